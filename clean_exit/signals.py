"""Pass the signals of the command on to the program.

The supervisor leaves out those that were sent to the whole process group, because the program has
them already. The kernel stops and continues the group, so these signals are not passed on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import ClassVar

# Signals about this process itself, and those that no process can handle.
_OWN = ("CHLD", "CONT", "PIPE", "TSTP", "TTIN", "TTOU", "URG", "WINCH", "XCPU", "XFSZ", "KILL",
        "STOP")  # fmt: skip
Sender = tuple[int, int]
"""Who sent a signal: its si_code and si_pid, as in sigaction(2)."""


class ForwardedSignals:
    """Context manager that receives the signals of this process in a thread.

    Enter it in the main thread, before other threads are started.

    Attributes:
        active: The one that is entered; None in processes that only call `clean_exit.check`.
        mask: The signals that were blocked before; the program starts with these.
    """

    active: ClassVar[ForwardedSignals | None] = None

    def __init__(self) -> None:
        self.mask: Collection[int] = ()
        others = {getattr(signal, f"SIG{name}", 0) for name in _OWN}
        self._received = signal.valid_signals() - others
        self._forward: Callable[[int, Sender], bool] | None = None
        self._pending: list[tuple[int, Sender]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="clean-exit signals", daemon=True)

    def __enter__(self) -> ForwardedSignals:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._received)
        self._thread.start()
        ForwardedSignals.active = self
        return self

    def __exit__(self, *exception: object) -> None:
        ForwardedSignals.active = None
        self._closing = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, min(self._received))
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def attach(self, forward: Callable[[int, Sender], bool]) -> None:
        """Pass signals to a function from now on, beginning with those that came before.

        Args:
            forward: Takes a signal and its sender; returns False if the program has ended.
        """
        with self._lock:
            self._forward = forward
            self._pending = [one for one in self._pending if not forward(*one)]

    def _run(self) -> None:
        while True:
            if hasattr(signal, "sigwaitinfo"):
                info = signal.sigwaitinfo(self._received)
                number, sender = info.si_signo, (info.si_code, info.si_pid)
            else:  # macOS, where the sender is not known.
                number, sender = signal.sigwait(self._received), (0, 0)
            if self._closing:
                return
            with self._lock:
                if self._forward is None or not self._forward(number, sender):
                    self._pending.append((number, sender))


def open_closed_files() -> None:
    """Open /dev/null as stdin, stdout and stderr if they are closed.

    Otherwise another file of this process would get their number and be written to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number: this one.
            os.set_inheritable(number, True)
