"""Tests of models in a process of their own."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="call-overload, attr-defined"

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hosted_models import Model, Picky
from tests.support.hosting_stub import run as run_loop
from tests.support.interrupts import Interrupt, Place, interrupt_everywhere
from tests.support.programs import Result, assert_clean, run
from tests.support.threads import in_threads
from tests.support.waiting import is_there, wait_for, wait_for_async
from torch_utils import ModelHost, ModelProcessError, ResourceClosedError


def host_of(load: Any = Model) -> ModelHost[Any]:
    return ModelHost(load, name="stub", isolation="process", keep_alive=-1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """A model shared by all tests that do not change it."""
    with host_of(partial(Model, "an argument")) as host, host.lease() as model:
        yield model


@pytest.fixture
def host() -> Iterator[ModelHost[Any]]:
    with host_of() as host:
        yield host


# Calls


def test_proxy_calls_methods_and_reads_attributes() -> None:
    """It ends with its lease. ``environment`` is that of the process only."""
    with ModelHost(Model, isolation="process", environment={"CUDA_VISIBLE_DEVICES": "7"}) as host:
        with host.lease() as model:
            pid = model.pid()
            assert pid != os.getpid()
            assert model.call(os.getenv, "CUDA_VISIBLE_DEVICES") == "7"
            assert os.getenv("CUDA_VISIBLE_DEVICES") != "7"
            assert model.call(os.getenv, "PATH") == os.environ["PATH"]
            assert (model.echo(1, key=2), model.dimension, model(3)) == ((1, {"key": 2}), 3, [3])
            assert host.status().nbytes > 1_000_000
            with pytest.raises(AttributeError, match="nothing"):
                _ = model.nothing
            with pytest.raises(AttributeError, match="dimension"):
                model.dimension = 4
            assert model.itself() is model
            with pytest.raises(AttributeError, match="echo is in another process"):
                model.itself.echo(1)
        with pytest.raises(ResourceClosedError, match="has ended"):
            model.echo(1)
        assert host.unload().freed_bytes["host"] > 1_000_000
        assert not is_there(pid) and host.status().state == "unloaded"


@pytest.mark.parametrize(("count", "order"), [(0, "C"), (10, "F"), (100_000, "F"), (600_000, "C")])
def test_arrays_are_transferred_intact_and_writable(shared, count: int, order: str) -> None:
    """Also those of more than 4 MiB, whose memory is mapped."""
    sent = np.asarray(np.random.default_rng(count).random((2, count // 2)), np.float64, order=order)
    received, text, part = shared.echo([sent, b"x" * count, sent[:, ::2]])
    assert received.dtype == sent.dtype
    assert np.array_equal(received, sent) and np.array_equal(part, sent[:, ::2])
    assert text == b"x" * count
    received += 1


def test_concurrent_threads_get_their_own_results(shared) -> None:
    def work(thread: int) -> bool:
        return all(shared.echo((thread, n)) == (thread, n) for n in range(50))

    assert in_threads(*[partial(work, thread) for thread in range(8)]) == [True] * 8


# Errors


def test_exceptions_keep_their_type_and_traceback(
    shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of the process is a note.

    Exceptions that cannot be unpickled, and those of modules that this process has not imported,
    keep their text.
    """
    with pytest.raises(ValueError, match="no such text") as caught:
        shared.fail(ValueError, "no such text")
    assert "in fail\n" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ModelProcessError, match=r"Picky\('one and two'\)"):
        shared.fail(Picky, "one", "two")
    with pytest.raises(ModelProcessError, match="stub raised"):
        shared.fail(KeyboardInterrupt)
    (tmp_path / "only_in_the_child.py").write_text("class Trouble(RuntimeError): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with host_of() as host, host.lease() as model:
        with pytest.raises(ModelProcessError, match=r"Trouble\('of its own'\)"):
            model.call(exec, "import only_in_the_child as own; raise own.Trouble('of its own')")
    assert "only_in_the_child" not in sys.modules


def test_values_that_cannot_be_pickled_are_refused(shared) -> None:
    """The process continues."""
    for argument in (threading.Lock(), lambda: 1):
        with pytest.raises(pickle.PicklingError, match=r"stub\.echo\(\) runs in another proc"):
            shared.echo([argument])
    with pytest.raises(pickle.PicklingError, match=r"_thread\.lock that cannot be pickled"):
        shared.call(threading.Lock)
    assert shared.echo(1) == 1


def test_failed_load_raises_and_ends_the_process() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    for load, error, text in (
        (partial(open, "/no such weights"), FileNotFoundError, "no such weights"),
        (partial(sys.exit, 7), ModelProcessError, "has ended: exit code 7"),
    ):
        with host_of(load) as host:
            with pytest.raises(error, match=text):
                host.load()
            assert children.read_text() == before


# Ends


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((sys.exit, 3), "exit code 3"),
        ((signal.raise_signal, signal.SIGKILL), "(SIGKILL)"),
        ((time.sleep, 600), "a call took longer than 2 s"),
    ],
    ids=["exit", "kill", "hang"],
)
def test_end_during_a_call_raises_and_next_lease_restarts(call: Any, text: str, capfd) -> None:
    """Also if the process is killed because of ``call_timeout_s``."""
    limit_s = 2 if "2 s" in text else None
    with ModelHost(Model, isolation="process", call_timeout_s=limit_s) as host:
        with host.lease() as model:
            pid = model.pid()
            model.call(print, "these are my last words")
            with pytest.raises(ModelProcessError, match="has ended") as caught:
                model.call(*call)
            assert text in str(caught.value)
            assert "these are my last words" in capfd.readouterr().out
            assert not Path(f"/proc/{pid}").exists()
            with pytest.raises(ModelProcessError, match="has ended"):
                model.echo(1)
        assert host.status().state == "unloaded"
        with host.lease() as model:
            assert model.pid() != pid
        assert (host.status().loads, host.status().unloads) == (2, 1)


def test_status_and_next_call_notice_the_end_of_the_process(host) -> None:
    """Although a fork of the process has its descriptors."""
    with host.lease() as model:
        child, pid = model.fork(), model.pid()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_there(pid))
        assert (host.status().state, host.status().nbytes) == ("unloaded", 0)
        with pytest.raises(ModelProcessError, match="SIGKILL"):
            model.echo(1)
        os.kill(child, signal.SIGKILL)


def test_cancelled_call_gives_up_the_answer_only(host, tmp_path: Path) -> None:
    """New calls wait for its end, and calls that have not begun are dropped."""
    go_on = tmp_path / "go on"

    def note(number: int) -> Coroutine[Any, Any, Any]:
        return host.call(lambda model: model.note_and_wait(number, str(go_on)))

    async def main() -> None:
        async with host.alease():
            pid = await host.call(lambda model: model.pid())
            tasks = [asyncio.create_task(note(number)) for number in range(3)]
            await wait_for_async(lambda: list(tmp_path.iterdir()) and host.status().leases == 4)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*tasks), 0.01)
        with pytest.raises(TimeoutError, match=r"busy with another call after 0\.01 s"):
            async with host.alease(timeout_s=0.01) as model:
                model.echo(1)
        go_on.touch()
        async with host.alease(timeout_s=60) as model:
            assert await asyncio.to_thread(model.pid) == pid

    run_loop(main)
    assert (host.status().loads, host.status().leases) == (1, 0)
    assert len([path for path in tmp_path.iterdir() if path != go_on]) == 1


def test_close_waits_for_a_call_whose_lease_has_ended(tmp_path: Path) -> None:
    go_on, answers = tmp_path / "go on", []
    with host_of() as host:
        with host.lease() as model:
            call = partial(model.note_and_wait, 1, str(go_on))
            ask = threading.Thread(target=lambda: answers.append(call()))
            ask.start()
            wait_for(lambda: list(tmp_path.iterdir()))
        threading.Timer(0.1, go_on.touch).start()
    ask.join()
    assert answers == [1]


def test_timeout_of_a_lease_limits_the_start_of_the_process() -> None:
    """It goes on for the next caller."""
    with host_of(partial(Model, 1)) as host:
        with pytest.raises(TimeoutError, match=r"still loading after 0\.001 s"):
            host.lease(timeout_s=0.001).__enter__()
        with host.lease(timeout_s=60) as model:
            assert model.arguments == (1,)
        assert host.status().loads == 1


# Signals and surroundings


def test_signals_to_the_group_reach_only_the_parent(host, tmp_path: Path) -> None:
    """Calls go on; programs and forks that the model starts get the signals."""
    go_on = tmp_path / "go on"
    with host.lease() as model:
        pid = model.pid()

        def send() -> None:
            wait_for(lambda: list(tmp_path.iterdir()))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            go_on.touch()

        def has_ended() -> bool:
            os.kill(fork, signal.SIGTERM)  # Python forgets one that comes in the middle of a fork.
            return not is_there(fork)

        assert in_threads(lambda: model.note_and_wait(1, str(go_on)), send) == [1, None]
        program = model.call(subprocess.run, ["sh", "-c", "kill $$"])
        assert program.returncode == -signal.SIGTERM
        fork = model.fork()
        wait_for(has_ended)
        assert model.pid() == pid


def test_freed_bytes_are_anonymous_memory(host) -> None:
    """Mapped files, such as libraries, may be shared with other processes."""
    with host.lease() as model:
        model.map_file(64 << 20)
        status = Path(f"/proc/{model.pid()}/status").read_text()
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
    assert host.status().nbytes > anonymous + (64 << 20)
    assert host.unload().freed_bytes["host"] == pytest.approx(anonymous, abs=2 << 20)


# Forks


def test_forked_child_can_neither_call_nor_end_the_process(shared) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            shared.echo(1)
        except ModelProcessError as error:
            os._exit("a fork" not in str(error))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shared.echo(2) == 2


# Interrupts


@pytest.mark.parametrize("at_most", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_interrupts_never_mix_up_results_or_keep_locks(host, at_most: int) -> None:
    """The next answer is the next call's, or an error.

    Another thread asks for it, while the interrupt's traceback, and so its frames, are alive.
    """
    kept, answers = list[Interrupt](), set[type]()

    def interrupt() -> None:
        kept.append(Interrupt())
        raise kept[-1]

    def check(place: Place) -> None:
        with host.lease() as model:
            place.run(lambda: model.echo(place.number))
            (answer,) = in_threads(lambda: model.echo(-place.number))  # No lock is held.
            kept.clear()
        answers.add(type(answer))
        if isinstance(answer, ModelProcessError):
            assert place.delivered
        else:
            assert answer == -place.number, "the answer to another call"

    how: dict[str, Any] = {"package": "torch_utils", "minimum": at_most // 2, "at_most": at_most}
    interrupt_everywhere(check, **how, deliver=interrupt)
    assert answers == {int, ModelProcessError}


# Programs

PRELUDE = """
import os, sys, threading, time
from tests.support.hosted_models import Model
from torch_utils import ModelHost, is_out_of_memory
def start(load):
    return ModelHost(load, name="stub", isolation="process")
"""


def run_program(source: str, *arguments: str) -> Result:
    return run(PRELUDE + source, *arguments, options=("-W", "error"), as_file=True)


def test_process_ends_with_the_program_and_shares_its_output() -> None:
    """The main module is not imported again for a load function of another module."""
    result = run_program(
        """
host = start(Model)
with host.lease() as model:
    print(model.pid(), flush=True)
    model.call(print, "to stdout " * 300_000)
    model.call(os.write, 2, b"to stderr " * 300_000)
"""
    )
    assert result.returncode == 0, str(result)
    pid, stdout = result.stdout.split("\n", 1)
    assert not is_there(int(pid))
    assert stdout == "to stdout " * 300_000 + "\n"
    assert result.stderr == "to stderr " * 300_000


def test_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Even in a call that keeps the GIL. A fork of the parent does not keep it alive."""
    result = run_program(
        """
lease = start(Model).lease()
model = lease.__enter__()
print(model.pid(), flush=True)
def kill():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if os.fork() == 0:
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
threading.Thread(target=kill, daemon=True).start()
model.touch_and_spin(sys.argv[1])
""",
        str(tmp_path / "begun"),
    )
    assert result.returncode == -9, str(result)
    wait_for(lambda: not is_there(int(result.stdout)))


MAIN = """
class Own:
    def echo(self, value):
        return value
    def fail(self):
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory")
{guard}
    sys.path.insert(0, sys.argv[1])
    with start(Own) as host, host.lease() as model:
        print(model.echo(Own()).echo(3))
        try:
            model.fail()
        except Exception as error:
            print(type(error).__name__, is_out_of_memory(error))
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def test_classes_of_a_guarded_main_module_are_found(tmp_path: Path) -> None:
    """The parent does not import torch for an error of torch. Wrong modules get an error."""
    (tmp_path / "torch.py").write_text("class OutOfMemoryError(RuntimeError): pass\n")
    result = run_program(MAIN.format(guard='if __name__ == "__main__":'), str(tmp_path))
    assert_clean(result)
    assert result.stdout == "3\nModelProcessError True\n"
    result = run_program(MAIN.format(guard="if True:"), str(tmp_path))
    assert result.returncode == 1
    assert 'guard that code with `if __name__ == "__main__":`' in result.stderr
    result = run(Path("-"), stdin=f"{PRELUDE}class Own: pass\nstart(Own)")
    assert result.returncode == 1
    assert "defined in an interactive session" in result.stderr
