"""The judge of the matrix: it flags every kind of dirty exit, and not its clean twin."""

from __future__ import annotations

import pytest

from tests.torch_utils.hazards.row import Row
from tests.torch_utils.hazards.runner import Runner

MAKE = "import os; log('made', 1)\n"
RELEASE = "log('released', 1)\n"

DIRTY = {
    "noise with exit code 0": (MAKE + RELEASE + "class C:\n    def __del__(s): 1/0\nC()", "stderr"),
    "never released": (MAKE, "released 0 times"),
    "released twice": (MAKE + RELEASE * 2, "released 2 times"),
    "wrong exit code": (MAKE + RELEASE + "raise SystemExit(3)", "exit code 3"),
    "killed": (MAKE + RELEASE + "os.kill(os.getpid(), 9)", "exit code -9"),
    "nothing happened": ("pass", "nothing was made"),
    "released by a child": (
        MAKE + "if os.fork() == 0:\n    log('released', 1); os._exit(0)\nos.wait()\n" + RELEASE,
        "in a process that did not make it",
    ),
    "closed too early": (MAKE + RELEASE + "log('alive', False)", "own atexit callback"),
}
CLEAN = {
    "plain": MAKE + RELEASE,
    "quotes the message on stdout": MAKE + RELEASE + "print('Exception ignored in: <x>')",
    "left-over child with the streams open": MAKE + RELEASE + "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'])\n"
    "os._exit(0)",
}


@pytest.mark.parametrize("name", DIRTY)
def test_dirty_exit_is_flagged(runner: Runner, name: str) -> None:
    """Each kind of dirty exit is found, and named."""
    program, wanted = DIRTY[name]
    problems = runner.run(Row(name, program), "naive").problems
    assert any(wanted in problem for problem in problems), problems


@pytest.mark.parametrize("name", CLEAN)
def test_clean_exit_is_not_flagged(runner: Runner, name: str) -> None:
    """A clean program raises no alarm, whatever it says on stdout or leaves running."""
    assert runner.run(Row(name, CLEAN[name]), "naive").problems == []


def test_hang_is_ended() -> None:
    """A program that does not end is killed, and that is its exit code."""
    outcome = Runner(timeout_s=1).run(Row("hang", "import time; time.sleep(100)"), "naive")
    assert "exit code -9, not 0" in outcome.problems
