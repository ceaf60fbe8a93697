"""Tests of exit_on_signals."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import IMPORT_PATH, output_of
from tests.support.threads import errors_in_threads
from torch_utils import SignalError, TorchUtilsError, exit_on_signals

# What must be ended by a signal sleeps for so long that the test fails otherwise.
PRELUDE = """
import atexit, os, signal, sys, threading, time
from torch_utils import Resource, SafePyTorchCleanup, exit_on_signals

class R(Resource):
    def __init__(self, name, action=None):
        self.name, self.action = name, action
    def _release(self):
        print("begin", self.name, flush=True)
        if self.action: self.action()
        print("end", self.name, flush=True)

def kill(number): os.kill(os.getpid(), number)

def wait_until_ended():
    time.sleep(60)
    print("never")
"""


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("SIGINT", "SIGHUP"))]
)
def test_signal_ends_blocks_runs_atexit_and_closes_resources(name: str) -> None:
    program = """
number = getattr(signal, sys.argv[1])
exit_on_signals(number)
r = R("kept")
atexit.register(print, "atexit", flush=True)
with R("block"):
    kill(number)
    wait_until_ended()
"""
    code = 128 + getattr(signal, name)
    order = ["begin block", "end block", "atexit", "begin kept", "end kept"]
    assert output_of(PRELUDE + program, name, returncode=code).splitlines() == order


IN_THE_MIDDLE = {
    "slow kept": 'R("slow", action=lambda: kill(signal.SIGTERM)).close()',
    "slow outer kept": """
with SafePyTorchCleanup(R("outer")) as scope:
    scope.manage(R("slow", action=lambda: kill(signal.SIGTERM)))
""",
}


@pytest.mark.parametrize("order", IN_THE_MIDDLE)
def test_signal_waits_for_a_running_cleanup(order: str) -> None:
    """Of a resource, and at the end of a scope."""
    program = f'exit_on_signals()\nr = R("kept")\n{IN_THE_MIDDLE[order]}\nwait_until_ended()\n'
    output = output_of(PRELUDE + program, returncode=143)
    assert output.split() == " ".join(f"begin {n} end {n}" for n in order.split()).split()


def test_child_forked_in_a_release_handles_signals_at_once() -> None:
    program = """
signal.signal(signal.SIGUSR1, lambda number, frame: print("handled", flush=True))
def fork():
    if os.fork() == 0:
        kill(signal.SIGUSR1)
        os._exit(0)
    os.wait()
R("parent", action=fork).close()
"""
    output = output_of(PRELUDE + program).splitlines()
    assert output == ["begin parent", "handled", "end parent"]


@pytest.mark.parametrize(("when", "error"), [("during", "KeyboardInterrupt"), ("after", "Stop")])
def test_failing_release_loses_no_signal(when: str, error: str) -> None:
    program = """
class Stop(BaseException): pass
def fails():
    if sys.argv[1] == "during": kill(signal.SIGTERM)
    raise globals().get(sys.argv[2], KeyboardInterrupt)
exit_on_signals()
kept, bad = R("kept"), R("bad", action=fails)
try: bad.close()
except (Stop, KeyboardInterrupt): print("caught", flush=True)
kill(signal.SIGTERM)
wait_until_ended()
"""
    caught = "caught " if when == "after" else ""
    output = output_of(PRELUDE + program, when, error, returncode=143)
    assert output.split() == f"begin bad {caught}begin kept end kept".split()


def test_signal_breaks_off_no_exit_callback_and_keeps_the_exit_status() -> None:
    program = """
exit_on_signals()
def save():
    kill(signal.SIGTERM)
    print("saved", flush=True)
atexit.register(save)
a, b = R("a"), R("b", action=lambda: kill(signal.SIGTERM))
sys.exit(5)
"""
    output = output_of(PRELUDE + program, returncode=5)
    assert output.split() == "saved begin b end b begin a end a".split()


SECOND = """
exit_on_signals()
def kill_again():
    kill(signal.SIGTERM)  # `timeout` sends each signal twice.
    time.sleep(1.2)
    kill(signal.SIGTERM)
    wait_until_ended()
if sys.argv[1] == "in a release at exit":
    r = R("hangs", action=kill_again)
try:
    kill(signal.SIGTERM)
finally:
    if sys.argv[1] == "in a block":
        kill_again()
"""


@pytest.mark.parametrize("place", ["in a block", "in a release at exit"])
def test_second_signal_ends_a_program_that_hangs(place: str) -> None:
    assert "never" not in output_of(PRELUDE + SECOND, place, returncode=-signal.SIGTERM)


def test_earlier_handler_is_called_and_restored() -> None:
    program = """
def earlier(number, frame): print("earlier", number, flush=True)
signal.signal(signal.SIGTERM, earlier)
with exit_on_signals():
    assert signal.getsignal(signal.SIGTERM) is not earlier
assert signal.getsignal(signal.SIGTERM) is earlier
try:
    with exit_on_signals() as exits:
        kill(signal.SIGTERM)
        wait_until_ended()
except SystemExit as error:
    print(error.code)
assert signal.getsignal(signal.SIGTERM) is exits.previous[signal.SIGTERM] is earlier
"""
    assert output_of(PRELUDE + program) == "earlier 15\n143\n"


def test_restore_leaves_newer_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    handlers = exit_on_signals(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert handlers.restore() is False
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_mistakes_are_refused_and_change_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    wrong: list[Any] = [signal.SIGKILL, 999, "SIGINT", [signal.SIGINT]]
    for number in wrong:
        with pytest.raises(SignalError, match=r"cannot handle .* with signals that can be caught"):
            exit_on_signals(signal.SIGTERM, number)
        assert signal.getsignal(signal.SIGTERM) is before
    (error,) = errors_in_threads(exit_on_signals)
    assert isinstance(error, TorchUtilsError) and "call it in the main thread" in str(error)


def test_event_loop_receives_signals_once_and_logs_nothing() -> None:
    """One that a release puts off, and one that ends the program in a task nobody waits for."""
    program = """
import asyncio
async def task():
    kill(signal.SIGTERM)
    for _ in range(100): time.sleep(0.0001)
async def main():
    loop, told = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGUSR1, told.append, 1)
    R("telling", action=lambda: kill(signal.SIGUSR1)).close()
    await asyncio.sleep(0.1)
    print(told, flush=True)
    kept = asyncio.create_task(task())
    await asyncio.sleep(60)
r = R("kept")
exit_on_signals()
asyncio.run(main())
"""
    output = output_of(PRELUDE + program, returncode=143)
    expected = ["begin telling", "end telling", "[1]", "begin kept", "end kept"]
    assert output.splitlines() == expected


IN_A_CALL = """
import signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from torch_utils import ModelHost, exit_on_signals

begun, stopping = Path("begun"), Path("stopping")

class Doubler:
    def compute(self, number):
        begun.touch()
        while not stopping.exists():
            time.sleep(0.01)
        return number * 2

    def close(self):
        print("closed", flush=True)

def answer(host):
    with host.lease() as model:
        print("answer", model.compute(21), flush=True)

if __name__ == "__main__":
    exit_on_signals(signal.SIGTERM, signal.SIGINT)
    with ModelHost(Doubler, isolation=sys.argv[2]) as host, ThreadPoolExecutor(1) as workers:
        call = workers.submit(answer, host)
        while not begun.exists():
            time.sleep(0.01)
        try:
            signal.raise_signal(getattr(signal, sys.argv[1]))
        finally:
            stopping.touch()
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_call_gets_its_answer_before_a_signal_ends_the_program(
    isolation: str, name: str, tmp_path: Path, clean_exit: Any
) -> None:
    """The model is closed once, and no process remains."""
    (tmp_path / "program.py").write_text(IN_A_CALL)
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    report = clean_exit(
        ["program.py", name, isolation],
        returncode=128 + getattr(signal, name),
        cwd=tmp_path,
        env=env,
        max_shutdown_s=120,
    )
    assert report.stdout == "answer 42\nclosed\n", report.stderr
