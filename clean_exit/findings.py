"""The findings of a check: their stable ids, and one finding with its evidence."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FINDINGS = {
    "unraisable": "an exception that Python could only print",
    "atexit-error": "an atexit callback failed",
    "finalizer-error": "a finalizer failed",
    "thread-error": "an exception ended a thread",
    "logging-error": "a log message could not be written at exit",
    "failed-tests": "tests failed, but the program's exit code is 0",
    "unfinished-tests": "the program ended before its test session did",
    "crash": "a signal ended the program",
    "hang": "the program did not end",
    "slow-shutdown": "the program took too long to end",
    "leaked-semaphore": "semaphores were not released",
    "leaked-shared-memory": "shared memory was not released",
    "orphan-process": "a process outlived the program",
    "process-group-not-destroyed": "a torch.distributed process group was not destroyed",
    "cuda-ipc": "shared CUDA tensors outlived the process that created them",
    "resource-warning": "a resource was not closed explicitly",
}
ABOUT_A_CHILD = "about a child process; children=ignore counts the program itself only"
PHASES = {
    "main": "while the main module ran",
    "threads": "while threads were joined",
    "atexit": "in atexit callbacks",
    "teardown": "during interpreter teardown",
}


@dataclass(frozen=True)
class Finding:
    """One fault of a program's exit.

    Attributes:
        id: One of `FINDINGS`; the ids are stable.
        summary: A description in one line.
        evidence: A traceback, a stack or a list of processes; may be "".
        phase: One of `PHASES`, if the process is Python and the phase is known; else "".
        pid: The process id, if it is known.
        process: The command line of that process, if it is not the program itself; else "".
        child: Whether it is about a child process, which ``children="ignore"`` leaves out.
        test: The test that ran, or that has started the process: its node id for pytest, its id for
            unittest. Outside of tests, the task of asyncio or the thread, such as ``task Task-1``;
            "" if there is none.
    """

    id: str
    summary: str
    evidence: str = ""
    phase: str = ""
    pid: int | None = None
    process: str = ""
    child: bool = False
    test: str = ""

    @property
    def help(self) -> str:
        """The command that explains the finding."""
        return f"clean-exit --explain {self.id}"

    @property
    def where(self) -> str:
        """The phase, the test, and the id and command line of a child process, for people."""
        parts = [PHASES[self.phase]] if self.phase else []
        if self.test:
            parts.append(f"in {self.test}")
        if self.process:
            parts.append(f"in process {self.pid}: {self.process}")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.summary}" + (f" ({self.where})" if self.where else "")]
        lines += [f"    {line}" for line in self.evidence.splitlines()]
        if self.child:
            lines.append(f"    {ABOUT_A_CHILD}")
        return "\n".join(lines)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
