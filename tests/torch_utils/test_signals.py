"""Tests of exit_on_signals."""

import signal
from typing import Any

import pytest

from tests.support.programs import output_of
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


def test_signal_waits_for_a_running_scope() -> None:
    program = """
exit_on_signals()
r = R("kept")
with SafePyTorchCleanup(R("outer")) as scope:
    scope.manage(R("slow", action=lambda: kill(signal.SIGTERM)))
wait_until_ended()
"""
    output = output_of(PRELUDE + program, returncode=143)
    assert output.split() == "begin slow end slow begin outer end outer begin kept end kept".split()


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


def test_failing_release_loses_no_signal() -> None:
    program = """
def fails():
    kill(signal.SIGTERM)
    raise KeyboardInterrupt
exit_on_signals()
kept, bad = R("kept"), R("bad", action=fails)
try: bad.close()
except KeyboardInterrupt: print("lost", flush=True)
wait_until_ended()
"""
    output = output_of(PRELUDE + program, returncode=143)
    assert output.split() == "begin bad begin kept end kept".split()


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


def test_second_signal_ends_a_program_that_hangs() -> None:
    program = """
exit_on_signals()
def hang():
    kill(signal.SIGTERM)  # `timeout` sends each signal twice.
    time.sleep(1.2)
    kill(signal.SIGTERM)
    wait_until_ended()
r = R("hangs", action=hang)
kill(signal.SIGTERM)
"""
    assert output_of(PRELUDE + program, returncode=-signal.SIGTERM) == "begin hangs\n"


def test_earlier_handler_is_called_and_restored() -> None:
    """Unless the program has installed a newer one meanwhile."""
    program = """
def earlier(number, frame): print("earlier", number, flush=True)
signal.signal(signal.SIGTERM, earlier)
try:
    with exit_on_signals() as exits:
        kill(signal.SIGTERM)
        wait_until_ended()
except SystemExit as error:
    print(error.code)
assert signal.getsignal(signal.SIGTERM) is exits.previous[signal.SIGTERM] is earlier
with exit_on_signals() as exits:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert exits.restore() is False
assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
"""
    assert output_of(PRELUDE + program) == "earlier 15\n143\n"


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


def test_call_gets_its_answer_before_a_signal_ends_the_program() -> None:
    """The end of the host's block waits for the lease of the other thread."""
    program = """
from torch_utils import ModelHost
begun, interrupted = threading.Event(), threading.Event()
def answer():
    with host.lease():
        begun.set()
        interrupted.wait()
        print("answer", flush=True)
exit_on_signals()
with ModelHost(lambda: R("model")) as host:
    threading.Thread(target=answer, daemon=True).start()
    begun.wait()
    try: kill(signal.SIGTERM)
    finally: threading.Timer(0.2, interrupted.set).start()
"""
    output = output_of(PRELUDE + program, returncode=143)
    assert output.splitlines() == ["answer", "begin model", "end model"]
