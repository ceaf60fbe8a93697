"""The processes of one run: all that descends from its keeper, which adopts the orphans.

Reads /proc; where there is none (not on Linux), no process but the program itself is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_HELPERS = ("resource_tracker", "semaphore_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same id by when it was started.

    Attributes:
        is_ending: Whether it has given up its memory, and the kernel is about to end it, which on
            a busy machine, or for one that had much, takes a while.
    """

    pid: int
    start_ticks: int
    parent: int
    state: str
    command: str
    is_ending: bool = False

    def is_helper(self) -> bool:
        """Whether it is one of Python's own, which end by themselves when the program has."""
        return any(name in self.command for name in _HELPERS)

    def __str__(self) -> str:
        return f"{self.pid} {self.command or '(no command line)'}"


def descendants(ancestor: int) -> list[Process]:
    """List the live processes below one, itself excepted."""
    table = {process.pid: process for process in _all_processes()}
    return sorted(
        (p for p in table.values() if p.state not in "ZX" and _descends(p, table, ancestor)),
        key=lambda process: process.pid,
    )


def _all_processes() -> Iterator[Process]:
    try:
        names = [name for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return
    for name in names:
        process = read_process(int(name))
        if process is not None:
            yield process


def read_process(pid: int) -> Process | None:
    """Describe a process, which may be a zombie; None if there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
        command = (_PROC / str(pid) / "cmdline").read_bytes()
        # The name in parentheses may contain anything: fields are counted from its end (proc(5)).
        fields = stat[stat.rindex(b")") + 2 :].split()
        shown = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
        state = fields[0].decode()
        is_ending = fields[20] == b"0"
        if state == "Z" and int(fields[17]) > 1:  # Only its first thread has ended.
            state, is_ending = "S", False
        return Process(pid, int(fields[19]), int(fields[1]), state, shown[:300], is_ending)
    except (OSError, ValueError, IndexError):  # It has ended meanwhile, or is another user's.
        return None


def _descends(process: Process, table: dict[int, Process], ancestor: int) -> bool:
    parent = process.parent
    for _ in range(1000):
        if parent == ancestor:
            return True
        above = table.get(parent)
        if above is None:
            return False
        parent = above.parent
    return False
