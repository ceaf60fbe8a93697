"""Signals on their way: each one that the command gets reaches the program exactly once.

They are blocked in this process and taken by a thread, which hands them to the keeper: that
knows whether the whole process group got it, as from a terminal, and the program with it. And
each one that the program sends to its parent reaches the parent of this process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Collection

from .run import Run

# They tell of this process's own children, or stop it before it writes to a terminal.
_OWN = ("CHLD", "TTIN", "TTOU")
_NOT_BLOCKABLE = ("KILL", "STOP")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# What the kernel also sends because of something that this process itself did.
_BY_WRITING = (signal.SIGPIPE, getattr(signal, "SIGXFSZ", None))
_FROM_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_GROUP_S = 1.0  # as long as that a signal for the whole group is known to be one


def _taken() -> set[int]:
    others = {getattr(signal, f"SIG{name}", None) for name in (*_OWN, *_NOT_BLOCKABLE)}
    return {int(number) for number in signal.valid_signals()} - others


class Signals:
    """Takes all signals while it is open, for a process that stands in a program's place.

    What comes before a program has started is kept for it, as it would have been plainly. Has
    to be opened before other threads are started, and by the main thread.

    Attributes:
        mask: The signals that were blocked before.
        asked_to_end: Whether one came that ends programs.
    """

    def __init__(self) -> None:
        self.asked_to_end = False
        self.mask: Collection[int] = ()
        self._run: Run | None = None
        self._early: list[tuple[int, int]] = []
        self._caller = os.getppid()
        self._passed: dict[tuple[int, int], float] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._take, name="clean-exit signals", daemon=True)

    def __enter__(self) -> Signals:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken())
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, signal.SIGURG)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def attach(self, run: Run) -> None:
        """Begin to pass on to a run, what has come before included."""
        with self._lock:
            self._run = run
            early, self._early = self._early, []
        for number, sender in early:
            run.pass_on(number, sender)

    def hand_up(self, number: int, sender: int) -> None:
        """Send who called this process what the program has sent to its parent.

        Not if the whole process group got it, which the caller may be in.
        """
        with self._lock:
            passed_s = self._passed.get((number, sender), -math.inf)
        if time.monotonic() < passed_s + _GROUP_S or not 0 < os.getppid() == self._caller:
            return
        with contextlib.suppress(OSError):  # Another user's, as plainly.
            os.kill(self._caller, number)

    def stop(self, number: int) -> None:
        """Stop this process by a signal of a terminal's, which a shell then tells of."""
        if number not in _FROM_TERMINAL:
            return  # SIGSTOP was for the program alone.
        if signal.getsignal(number) is not signal.SIG_DFL:
            number = signal.SIGSTOP
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.pthread_kill(threading.get_ident(), number)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _take(self) -> None:
        taken = _taken()
        while True:
            if hasattr(signal, "sigwaitinfo"):
                info = signal.sigwaitinfo(taken)
                number, sender = info.si_signo, info.si_pid
                if number in _BY_WRITING and sender == os.getpid():
                    continue
                if number == signal.SIGXCPU and info.si_code > 0:
                    continue  # The kernel's, about this process; it counts each one's time alone.
            else:  # macOS
                number, sender = signal.sigwait(taken), 0
            if self._closing and number == signal.SIGURG:
                return
            self.asked_to_end = self.asked_to_end or number in _ENDING
            with self._lock:
                run = self._run
                self._passed[number, sender] = time.monotonic()
                if run is None:
                    self._early.append((number, sender))
            if run is not None:
                run.pass_on(number, sender)


def fill_closed_files() -> set[int]:
    """Open /dev/null in place of those of the files 0, 1 and 2 that are closed; return which.

    Otherwise a private file of this process would get their number, and be written to.
    """
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free: this one.
    return closed
