"""A model in a process of its own: every answer is its call's, and every end is clear."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hosted_models import Model, load_and_leave, load_nothing
from interrupts import Interrupt, everywhere, run_interrupted

import torch_utils.hosting.process as process_module
from torch_utils.errors import ModelProcessError
from torch_utils.hosting.process import ModelProcess, pickled_load
from torch_utils.oom import is_out_of_memory
from watching import wait_for


def start(load=Model) -> ModelProcess:
    process = ModelProcess(pickled_load(load), name="stub")
    process.wait_until_loaded()
    return process


@pytest.fixture(scope="module")
def shared():
    """One process for all tests that leave it as it was."""
    process = start(partial(Model, "an argument"))
    yield process
    process.end()


@pytest.fixture
def process():
    process = start()
    yield process
    process.end()


def test_calls_and_attributes(shared) -> None:
    """Arguments by place and by name, attributes, and what can be called."""
    assert shared.call("echo", 1) == 1
    assert shared.call("echo", "ä", key=[None]) == ("ä", {"key": [None]})
    assert shared.call("__call__", 5) == [5]
    assert shared.get("dimension") == (False, 3)
    assert shared.get("arguments") == (False, ("an argument",))
    assert shared.get("echo") == (True, None)
    assert {"echo", "say"} <= shared.methods
    assert not {"dimension", "arguments", "__init__"} & shared.methods
    assert shared.call("pid") == shared.pid != os.getpid()


@pytest.mark.parametrize("count", [0, 10, 100_000, 3_000_000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_arrive_whole(shared, count: int, order: str) -> None:
    """Through the socket and through shared memory; what comes may be written to."""
    sent = np.asarray(np.random.default_rng(count).random((2, count // 2)), np.float64, order=order)
    came = shared.call("echo", sent)
    assert came.dtype == sent.dtype
    assert np.array_equal(came, sent)
    came += 1
    assert np.array_equal(shared.call("echo", [sent[:, ::2], b"x" * count])[0], sent[:, ::2])


def test_no_answer_changes_an_earlier_one(shared) -> None:
    """More results are held than there are segments, which are used again when they are not."""
    held = [shared.call("echo", np.full(300_000, n, np.int16)) for n in range(40)]
    for n in range(40):
        shared.call("echo", np.full(300_000, -n, np.int16))
    assert all((array == n).all() for n, array in enumerate(held))
    before = len(os.listdir("/proc/self/fd"))
    del held
    for n in range(100):
        assert (shared.call("echo", np.full(300_000, n, np.int16)) == n).all()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_arguments_stay_as_they_were(shared) -> None:
    """The model may keep what it got: later calls do not write over it."""
    shared.call("keep", np.full(1_000_000, 7, np.uint8))
    for n in range(5):
        shared.call("echo", np.full(1_000_000, n, np.uint8))
    assert (shared.get("kept")[1] == 7).all()
    shared.call("keep", None)


def test_fork_gets_results_of_its_own(shared) -> None:
    """Neither it nor its parent nor later answers change what the other sees."""
    mine = shared.call("echo", np.zeros(1_000_000, np.uint8))
    if os.fork() == 0:
        mine[:] = 1
        os._exit(int(mine.min()) - 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    for n in range(5):
        shared.call("echo", np.full(1_000_000, n, np.uint8))
    assert not mine.any()


def test_errors_come_as_they_are(shared) -> None:
    """With their type, and the traceback of the other side as a note."""
    with pytest.raises(ValueError, match="no such text") as caught:
        shared.call("fail")
    assert "in fail\n" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(AttributeError, match="no_such_method"):
        shared.call("no_such_method")
    with pytest.raises(MemoryError):
        shared.call("out_of_memory")
    assert shared.call("echo", 1) == 1


def test_errors_that_cannot_come(shared, tmp_path: Path, monkeypatch) -> None:
    """Their text does: what cannot be pickled, what this process has not imported, Ctrl-C."""
    (tmp_path / "only_in_the_child.py").write_text(
        "class Trouble(RuntimeError): pass\nclass Thing: pass\n"
    )
    with pytest.raises(ModelProcessError, match=r"Picky\('one and two'\)"):
        shared.call("fail", "Picky")
    with pytest.raises(ModelProcessError, match="stub raised KeyboardInterrupt"):
        shared.call("fail", "interrupt")
    shared.call("echo", 0)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = start()
    with pytest.raises(ModelProcessError, match=r"Trouble\('of its own'\)"):
        process.call("fail", "elsewhere")
    with pytest.raises(ModelProcessError, match="has not imported only_in_the_child"):
        process.call("give", "elsewhere")
    assert "only_in_the_child" not in sys.modules
    assert process.call("echo", 2) == 2
    process.end()


def test_what_cannot_be_pickled(shared) -> None:
    """Said to whoever sends or returns it; the process goes on."""
    for ask in (shared.call, shared.begin):
        for argument in (threading.Lock(), lambda: 1):
            with pytest.raises(pickle.PicklingError, match=r"stub\.echo\(\) runs in another proc"):
                ask("echo", [argument])
    with pytest.raises(pickle.PicklingError, match=r"builtins.generator that cannot be pickled"):
        shared.call("give", "generator")
    assert shared.call("echo", 1) == 1


def test_text_of_memory_errors_is_understood() -> None:
    """A batch is halved also where the error's class did not come through."""
    assert is_out_of_memory(ModelProcessError("stub raised OutOfMemoryError('CUDA out of memory')"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sys.exit", "exit code 3"),
        ("_exit", "exit code 4"),
        ("abort", "SIGABRT"),
        ("kill", "(SIGKILL)"),
    ],
)
def test_end_in_the_middle_of_a_call(capfd, how: str, said: str) -> None:
    """Whoever waits learns how, with the last words, which also go on to stderr; no zombie."""
    process = start()
    with pytest.raises(ModelProcessError, match="has ended") as caught:
        process.call("leave", how)
    assert said in str(caught.value)
    assert "last words: these are my last words" in str(caught.value)
    assert "these are my last words" in capfd.readouterr().err
    assert not Path(f"/proc/{process.pid}").exists()
    assert not process.is_alive()
    with pytest.raises(ModelProcessError, match="has ended"):
        process.call("echo", 1)


def test_one_that_hangs_up_and_stays_is_killed(process, monkeypatch) -> None:
    """And that is what the error says: memory has not run out."""
    monkeypatch.setattr(process_module, "GRACE_S", 0.25)
    with pytest.raises(ModelProcessError, match=r"was still there 0\.25 s later") as caught:
        process.call("hang_up")
    assert "memory" not in str(caught.value)
    assert not Path(f"/proc/{process.pid}").exists()


def test_end_between_calls(process) -> None:
    """Found by the next call; what its own children hold open does not hide it."""
    pid = process.call("fork")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ModelProcessError, match="SIGKILL"):
        process.call("echo", 1)
    os.kill(pid, signal.SIGKILL)


def test_load_that_fails() -> None:
    """Its error comes, and nothing stays behind."""
    for load, error, text in (
        (load_nothing, OSError, "no such weights"),
        (load_and_leave, ModelProcessError, "exit code 7; its last words: out of shells"),
    ):
        process = ModelProcess(pickled_load(load), name="stub")
        with pytest.raises(error, match=text):
            process.wait_until_loaded()
        assert not Path(f"/proc/{process.pid}").exists()


def test_lambda_is_refused() -> None:
    """At once, and with what to do instead."""
    with pytest.raises(TypeError, match='isolation="thread"'):
        pickled_load(lambda: 1)


def test_interrupt_of_a_call_ends_the_process(process, tmp_path: Path) -> None:
    """At once, although the method takes ten minutes."""
    begun = tmp_path / "begun"

    def interrupt() -> None:
        wait_for(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        process.call("touch_and_sleep", str(begun))
    helper.join()
    assert not Path(f"/proc/{process.pid}").exists()


def test_interrupts_never_shift_answers() -> None:
    """At any instruction: the next answer is the next call's, or there is none."""
    process = start()
    counts = {"ended": 0, "lived": 0}

    def check(number: int) -> bool:
        nonlocal process
        if not process.is_alive():
            process = start()
        ended, arrived = run_interrupted(
            lambda: process.call("echo", number), number, "hosting/process.py", "hosting/frames.py"
        )
        try:
            assert process.call("echo", -number) == -number
            counts["lived"] += 1
        except ModelProcessError:
            assert arrived
            counts["ended"] += 1
        return ended

    everywhere(check, step=41)
    assert min(counts.values()) > 0, counts
    process.end()


def test_an_interrupt_that_is_kept_keeps_no_lock(process) -> None:
    """Its frames live as long as it does; another thread gets an answer all the same, or an error.

    A context manager of Python's that is interrupted at its beginning or before its end is left by
    nobody: as long as the exception lives, what it has taken stays taken.
    """
    kept = []

    def keep() -> None:
        kept.append(Interrupt())
        raise kept[-1]

    def check(number: int) -> bool:
        nonlocal process
        if not process.is_alive():
            process = start()
        files = ("hosting/process.py", "contextlib.py")
        ended, _ = run_interrupted(
            lambda: process.call("echo", number), number, *files, handler=keep, calls_only=True
        )
        answers = []

        def ask() -> None:
            try:
                answers.append(process.call("echo", -number))
            except ModelProcessError as error:
                answers.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(20)
        assert answers, f"still waiting after the interrupt at call {number}"
        process.end()
        return ended

    assert everywhere(check) > 5
    assert kept


def test_control_without_numbers_answers_shift(process) -> None:
    """What an interrupt between asking and listening does to a protocol without numbers."""
    channel = process._channel
    channel.send(5, pickle.dumps(("call", "echo", ("A",), {}), 5))
    select.select([channel], [], [])
    os.kill(process.pid, signal.SIGSTOP)  # Or its second answer may be there already.
    channel.send(6, pickle.dumps(("call", "echo", ("B",), {}), 5))
    assert pickle.loads(channel.receive()[1]) == (True, "A")  # for whoever asked B
    os.kill(process.pid, signal.SIGCONT)
    process._owed = 7
    with pytest.raises(ModelProcessError, match="message 6 came, not 7"):
        process.finish()
    assert not process.is_alive()


def test_end_in_another_thread(process, tmp_path: Path) -> None:
    """A call that is under way raises; ending does not wait for it longer than it may."""
    begun, errors = tmp_path / "begun", []

    def call() -> None:
        try:
            process.call("touch_and_sleep", str(begun))
        except ModelProcessError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    wait_for(begun.exists)
    process.end(grace_s=0)
    caller.join()
    assert len(errors) == 1


def test_many_threads(shared) -> None:
    """Each gets its own answers."""
    wrong = []

    def work(me: int) -> None:
        for n in range(50):
            if shared.call("echo", (me, n)) != (me, n):
                wrong.append((me, n))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lives_longer_than_the_thread_that_started_it() -> None:
    """PR_SET_PDEATHSIG would kill it then."""
    started = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    assert started[0].call("echo", 1) == 1
    started[0].end()


def test_fork_neither_uses_nor_ends_it(process) -> None:
    """It is told whose it is; its end is not the process's."""
    if os.fork() == 0:
        try:
            process.call("echo", 1)
        except ModelProcessError as error:
            os._exit(0 if "a fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert process.call("echo", 2) == 2


@pytest.mark.slow
def test_a_gigabyte() -> None:
    """As an argument and as a result."""
    process = start()
    assert int(process.call("ones", 1 << 30).sum()) == 1 << 30
    assert len(process.call("echo", np.ones(1 << 30, np.uint8))) == 1 << 30
    process.end()
