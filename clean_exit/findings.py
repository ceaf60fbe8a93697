"""What a check can find: stable ids, and one finding with its evidence."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FINDINGS = {
    "unraisable": "an error that Python could only print",
    "atexit-error": "an atexit callback failed",
    "finalizer-error": "a finalizer failed",
    "thread-error": "an error ended a thread",
    "crash": "a signal ended the program",
    "hang": "the program did not end",
    "slow-shutdown": "the program took long to end",
    "leaked-semaphore": "semaphores were not released",
    "leaked-shared-memory": "shared memory was not released",
    "left-over-process": "a process outlived the program",
    "process-group-not-destroyed": "a torch.distributed process group was not destroyed",
    "cuda-ipc": "shared CUDA tensors outlived the process that made them",
    "gpu-memory-held": "GPU memory is still held by a process of the program",
    "resource-warning": "something was left to the garbage collector to close",
}
PHASES = {
    "main": "while the main module ran",
    "threads": "while threads were joined",
    "atexit": "in atexit callbacks",
    "teardown": "while the interpreter was taken apart",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was not clean.

    Attributes:
        id: One of `FINDINGS`; these names stay as they are.
        summary: One line.
        evidence: A traceback, a list of processes, a stack; may be empty.
        phase: One of `PHASES`, where the process is Python and the moment is known; else empty.
        pid: The process, where it is known.
        process: The command line of that process, if it is not the program itself.
    """

    id: str
    summary: str
    evidence: str = ""
    phase: str = ""
    pid: int | None = None
    process: str = ""

    def __post_init__(self) -> None:
        if self.id not in FINDINGS:
            raise ValueError(f"there is no finding {self.id!r}; there are {', '.join(FINDINGS)}")

    @property
    def help(self) -> str:
        """The command that explains it."""
        return f"clean-exit --explain {self.id}"

    @property
    def where(self) -> str:
        """The phase and, of a child process, its command line and id; for people."""
        parts = [PHASES[self.phase]] if self.phase else []
        if self.process:
            parts.append(f"in process {self.pid}: {self.process}")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.summary}" + (f" ({self.where})" if self.where else "")]
        lines += [f"    {line}" for line in self.evidence.splitlines()]
        return "\n".join(lines)


def signal_name(number: int) -> str:
    """Name a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
