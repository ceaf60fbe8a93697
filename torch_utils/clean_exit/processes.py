"""The processes of one run: found by what they inherited, and ended only if they are that run's.

Reads /proc; where there is none (not on Linux), no process but the program itself is known.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUNS_VARIABLE = "CLEAN_EXIT_RUNS"
_PROC = Path("/proc")
_HELPERS = ("resource_tracker", "semaphore_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same id by when it was started."""

    pid: int
    start_ticks: int
    parent: int
    state: str
    command: str

    def is_helper(self) -> bool:
        """Whether it is one of Python's own, which end by themselves when the program has."""
        return any(name in self.command for name in _HELPERS)

    def __str__(self) -> str:
        return f"{self.pid} {self.command or '(no command line)'}"


def processes_of_run(token: str, root: int, adopted_by: int | None) -> list[Process]:
    """List the live processes of a run, the program itself excepted.

    A process belongs to a run if its environment, as it was when it was started, carries the
    run's token; or if it descends from the program, or from ``adopted_by``, which as a
    subreaper (prctl(2)) becomes the parent of whatever loses its own.
    """
    table = {process.pid: process for process in _all_processes()}
    ancestors = {root} if adopted_by is None else {root, adopted_by}
    found = []
    for process in table.values():
        if process.pid in (root, os.getpid()) or process.state in "ZX":
            continue
        if _descends(process, table, ancestors) or _carries(process.pid, token):
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def _all_processes() -> Iterator[Process]:
    try:
        names = [name for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return
    for name in names:
        process = _read(int(name))
        if process is not None:
            yield process


def _read(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # It has ended meanwhile, or is another user's.
        return None
    # The name in parentheses may contain anything: fields are counted from its end (proc(5)).
    fields = stat[stat.rindex(b")") + 2 :].split()
    shown = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0].decode(), shown[:300])


def find_process(pid: int) -> Process | None:
    """Describe a process; None if there is none, or if it has ended."""
    process = _read(pid)
    return None if process is None or process.state in "ZX" else process


def _descends(process: Process, table: dict[int, Process], ancestors: set[int]) -> bool:
    parent = process.parent
    for _ in range(1000):
        if parent in ancestors:
            return True
        above = table.get(parent)
        if above is None:
            return False
        parent = above.parent
    return False


def _carries(pid: int, token: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    start = b"\0" + RUNS_VARIABLE.encode() + b"="
    _, found, rest = (b"\0" + environment).partition(start)
    return bool(found) and token.encode() in rest.partition(b"\0")[0].split(b",")


def end(processes: list[Process], patience_s: float = 1.0) -> None:
    """End processes: SIGTERM first, SIGKILL for those that are still there afterwards."""
    remaining = processes
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in remaining:
            _send(process, sent)
        stop = time.monotonic() + patience_s
        while remaining and time.monotonic() < stop:
            reap_adopted(remaining)
            remaining = [process for process in remaining if is_alive(process)]
            time.sleep(0.01)


def is_alive(process: Process) -> bool:
    """Say whether that very process still runs."""
    now = _read(process.pid)
    return now is not None and now.start_ticks == process.start_ticks and now.state not in "ZX"


def _send(process: Process, number: int) -> None:
    try:
        handle = os.pidfd_open(process.pid)
    except (OSError, AttributeError):  # It has ended; a system without such handles.
        return
    try:
        if is_alive(process):  # The handle is this very process's: its id is not used again.
            signal.pidfd_send_signal(handle, number)
    except OSError:
        pass  # It has ended in between.
    finally:
        os.close(handle)


def reap_adopted(processes: list[Process]) -> None:
    """Collect the exit statuses of processes that became children of this one."""
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except OSError:
            pass  # It is not a child of this process.


def become_subreaper() -> bool:
    """Become the parent of every descendant that loses its own (Linux). For a whole process."""
    import ctypes

    set_child_subreaper = 36
    try:
        return bool(ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False
