"""What hangs below the keeper: who that is, and how it is ended. A part of keeper.py's program."""

import _signal as signal
import os
import time

_PATIENCE_S = 1.0  # between SIGTERM and SIGKILL
_LAST_RESORT_S = 10.0  # for the kernel to end what was killed


def end_all(below):
    """End all that a function says is below, again until nothing is: some start another."""
    told, beyond = set(), set()
    stop = time.monotonic() + _PATIENCE_S
    while time.monotonic() < stop:
        found = below() - beyond
        if not found:
            return
        for process in found - told:
            if not _send_to(process, signal.SIGTERM):
                beyond.add(process)
            _send_to(process, signal.SIGCONT)
        told |= found
        time.sleep(0.01)
    stop = time.monotonic() + _LAST_RESORT_S
    while time.monotonic() < stop:
        stopped = set()
        # First all are held, so that none can start another behind this one's back.
        while found := below() - stopped - beyond:
            beyond |= {p for p in found if not _send_to(p, signal.SIGSTOP)}
            stopped |= found
        for process in stopped - beyond:
            _send_to(process, signal.SIGKILL)
        if not stopped - beyond:
            return
        time.sleep(0.01)


def descendants():
    """Return what descends from this process and is alive: ids, and when each was started.

    None where that cannot be known: not Linux, or a /proc of other processes.
    """
    me = os.getpid()
    table = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    for name in names:
        fields = _read(name)
        if fields is not None:
            table[int(name)] = fields
    if me not in table:
        return None
    return {
        (pid, ticks)
        for pid, (_, state, ticks) in table.items()
        if state not in b"ZX" and _leads(pid, table, me)
    }


def is_below(pid):
    """Say whether a process, which may have ended, is known to descend from this one."""
    me = os.getpid()
    for _ in range(1000):
        fields = _read(pid)
        if fields is None or pid == me:
            break
        pid = fields[0]
    return pid == me


def _read(pid):
    """Return a process's parent, its state, and when it was started."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # See proc(5).
        # One of which only the first thread has ended is said to be a zombie as well.
        state = b"S" if fields[0] == b"Z" and int(fields[17]) > 1 else fields[0]
        return int(fields[1]), state, int(fields[19])
    except (OSError, IndexError):
        return None  # It has ended meanwhile.


def _leads(pid, table, ancestor):
    for _ in range(1000):
        pid = table.get(pid, (0,))[0]
        if pid in (ancestor, 0):
            break
    return pid == ancestor


def _send_to(process, number):
    """Signal that very process; False if that is not allowed."""
    pid, ticks = process
    if ticks is None:
        return send(pid, number)
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):
        handle = None  # It has ended, or the kernel is old.
    try:
        now = _read(pid)
        if now is None or now[2] != ticks:
            return True
        if handle is None:
            return send(pid, number)
        signal.pidfd_send_signal(handle, number)
    except PermissionError:
        return False
    except OSError:
        pass  # It has ended in between.
    finally:
        if handle is not None:
            os.close(handle)
    return True


def send(pid, number):
    """Send a signal; False if that is not allowed."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return False
    except OSError:
        pass  # It has ended.
    return True
