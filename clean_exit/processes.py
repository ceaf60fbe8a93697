"""Processes, read from /proc. Without /proc (not Linux), only the program itself is known.

The supervisor imports this module without site-packages, once for each run. So it imports little.
"""

from __future__ import annotations

import os

HELPERS = ("resource_tracker", "semaphore_tracker", "multiprocessing.forkserver")
"""What the command lines of the processes have that Python itself starts."""


class Process:
    """A process.

    Attributes:
        pid: The process id.
        parent: The id of the parent.
        state: The state as in proc(5): "S" sleeping, "R" running, "T" stopped, "Z" ended.
        ticks: The start in clock ticks since boot; a later process with the same id has another.
        busy_ticks: The processor time that it has used, in clock ticks.
        is_ending: Whether its memory is released already and the kernel is about to end it.
    """

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.parent: int = int(fields[1])
        self.state: str = fields[0].decode()
        self.busy_ticks: int = int(fields[11]) + int(fields[12])
        self.ticks: int = int(fields[19])
        self.is_ending: bool = fields[20] == b"0"
        if self.state == "Z" and int(fields[17]) > 1:  # Only its first thread has ended.
            self.state, self.is_ending = "S", False

    def command(self) -> str:
        """Return the command line, or "" if it cannot be read."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                words = file.read(300).replace(b"\0", b" ")
        except OSError:
            return ""
        return words.decode("utf-8", "replace").strip()

    def __str__(self) -> str:
        return f"{self.pid} {self.command() or '(no command line)'}"


def read_process(pid: int | str) -> Process | None:
    """Return a process, which may be a zombie; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        # The name in parentheses may contain any character; the fields follow it (proc(5)).
        return Process(int(pid), stat[stat.rindex(b")") + 2 :].split())
    except (OSError, ValueError, IndexError):
        return None  # It has ended.


def run_delay_ns(pid: int | str) -> int:
    """Return how long a process was ready to run and had to wait for a processor, in nanoseconds.

    It is the time of its first thread (proc_pid_schedstat in the kernel's documentation); 0 if the
    system does not say it.
    """
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = os.fsdecode(file.read()).split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def children() -> list[int]:
    """Return the ids of this process's children, which may be zombies; empty without /proc."""
    pids: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb") as file:
                pids += map(int, file.read().split())
    except OSError:  # A thread has ended, or the kernel has no such file.
        return [p.pid for p in descendants(os.getpid()) or [] if p.parent == os.getpid()]
    return pids


def descendants(ancestor: int) -> list[Process] | None:
    """List the live descendants of a process; None if /proc cannot be read."""
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    table = {p.pid: p for p in map(read_process, pids) if p is not None}
    if ancestor not in table:
        return None
    return [p for p in table.values() if p.state not in "ZX" and _is_below(p, table, ancestor)]


def _is_below(process: Process | None, table: dict[int, Process], ancestor: int) -> bool:
    for _ in range(1000):
        if process is None or process.parent == ancestor:
            return process is not None
        process = table.get(process.parent)
    return False


def send_signal(process: Process, number: int) -> bool:
    """Signal a process, but not a later one with its id; return False without permission."""
    # The kernel gives an id again only after all others: not between these two calls.
    now = read_process(process.pid)
    try:
        if now is not None and now.ticks == process.ticks:
            os.kill(process.pid, number)
    except PermissionError:
        return False
    except OSError:
        pass  # It has ended.
    return True
