"""Ask the probe for the stacks of a process: by a signal that would end any other process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .processes import read_process

STACKS_SIGNAL = 62  # as in the probe
_PATIENCE_S = 1.0


def ask_for_stacks(
    pid: int, offer: tuple[int, int | None] | None, file: Path, read: Callable[[], str]
) -> str:
    """Have the stacks of a process's threads written into a file, and return them.

    Nothing is sent unless that very process handles the signal and has that file open to write
    to: a program that has executed another one, that took the probe's descriptor, or whose id
    has gone to a stranger, would die of it or write elsewhere.

    Args:
        pid: The process.
        offer: What its probe has recorded: when the process was started, and the number of its
            file for stacks (None for any); None if it cannot write them.
        file: What its probe writes stacks to.
        read: Returns what is in there.
    """
    before = read()
    if offer is None or not _send(pid, *offer, file):
        return ""
    stacks, stop = "", time.monotonic() + _PATIENCE_S
    while time.monotonic() < stop:
        time.sleep(0.05)
        now = read()[len(before) :]
        if now and now == stacks:
            break
        stacks = now
    return stacks.strip()


def _send(pid: int, start_ticks: int, number: int | None, file: Path) -> bool:
    try:
        handle = os.pidfd_open(pid)  # From here on the id means one process only.
    except (OSError, AttributeError):  # It has ended; an old kernel, or not Linux.
        return False
    try:
        process = read_process(pid)
        if process is None or process.start_ticks != start_ticks:
            return False
        if not (_handles_signal(pid) and _has_open(pid, number, file)):
            return False
        signal.pidfd_send_signal(handle, STACKS_SIGNAL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _handles_signal(pid: int) -> bool:
    for line in Path("/proc", str(pid), "status").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _has_open(pid: int, number: int | None, file: Path) -> bool:
    wanted = str(file.resolve())
    for link in Path("/proc", str(pid), "fd").iterdir():
        try:
            if number in (None, int(link.name)) and str(link.readlink()) == wanted:
                return True
        except OSError:
            pass  # Closed meanwhile.
    return False
