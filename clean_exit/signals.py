"""Signals that the command gets are the program's: they are passed on to it.

What a terminal or the kernel sends goes to the whole process group, so the program has it already,
and the kernel stops and continues the group. All other signals are passed on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection

# Signals about this process itself, and those that cannot be taken.
_OWN = ("CHLD", "CONT", "PIPE", "TSTP", "TTIN", "TTOU", "URG", "WINCH", "XCPU", "XFSZ", "KILL",
        "STOP")  # fmt: skip
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class ForwardedSignals:
    """Context manager that takes the signals of this process, in a thread.

    To be entered by the main thread, before other threads are started.

    Attributes:
        mask: The signals that were blocked before; the program starts with these.
        asked_to_end: Whether one came that ends programs.
    """

    def __init__(self) -> None:
        self.asked_to_end: bool = False
        self.mask: Collection[int] = ()
        others = {getattr(signal, f"SIG{name}", 0) for name in _OWN}
        self._taken = signal.valid_signals() - others
        self._receive: Callable[[int, bool], bool] | None = None
        self._early: list[tuple[int, bool]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._take, name="clean-exit signals", daemon=True)

    def __enter__(self) -> ForwardedSignals:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, min(self._taken))
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def attach(self, receive: Callable[[int, bool], bool]) -> None:
        """Pass signals to a function from now on, and what has come before.

        Args:
            receive: Takes a signal and whether the program has it already; returns whether there
                is still a program.
        """
        with self._lock:
            self._receive = receive
            # The kernel has sent them to this process alone, for there was no program.
            self._early = [one for one in self._early if not receive(one[0], False)]

    def _take(self) -> None:
        while True:
            if hasattr(signal, "sigwaitinfo"):
                info = signal.sigwaitinfo(self._taken)
                number, is_for_group = info.si_signo, info.si_code > 0
            else:  # macOS, which does not tell the sender.
                number, is_for_group = signal.sigwait(self._taken), False
            if self._closing:
                return
            with self._lock:
                # One that is ignored here is still the program's, which may handle it.
                is_ignored = signal.getsignal(number) is signal.SIG_IGN
                self.asked_to_end |= number in _ENDING and not is_ignored
                if self._receive is None or not self._receive(number, is_for_group):
                    self._early.append((number, is_for_group))


def open_closed_files() -> None:
    """Open /dev/null in place of those of the files 0, 1 and 2 that are closed.

    Otherwise a private file of this process would get their number, and be written to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free: this one.
            os.set_inheritable(number, True)
