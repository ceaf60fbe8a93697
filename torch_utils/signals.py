"""exit_on_signals: end a program in order when it is told to end."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from torch_utils._registry import REGISTRY
from torch_utils._runtime import PHASE
from torch_utils.errors import SignalError

__all__ = ["SignalExit", "exit_on_signals"]


class SignalExit:
    """The handlers that `exit_on_signals` installed; as a context manager it restores.

    Attributes:
        previous: The handlers that were there before, by signal.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.previous: dict[int, Any] = {}
        self._begun = False
        self._first_s: float | None = None  # when the first signal came
        self._retry_pending = False
        for number in numbers:
            self.previous[number] = signal.signal(number, self._handle)

    def restore(self) -> bool:
        """Put the earlier handlers back, where these are still in place.

        Returns:
            True if any was put back.
        """
        restored = False
        for number, handler in self.previous.items():
            if signal.getsignal(number) == self._handle:
                # None is a handler that was not installed from Python and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
                restored = True
        return restored

    def __enter__(self) -> SignalExit:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._begun:
            return
        if self._first_s is None:
            self._first_s = time.monotonic()
        if _would_be_lost(frame, waited_s=time.monotonic() - self._first_s):
            self._try_again(number)
            return
        self._begun = True
        for ours in self.previous:
            if signal.getsignal(ours) == self._handle:
                signal.signal(ours, signal.SIG_DFL)  # A second signal ends the program at once.
        if not PHASE.exiting and REGISTRY.is_releasing_here():
            # In the middle of a release: it ends first, or what it holds would be half released
            # for ever. The registry runs this when it has.
            REGISTRY.postpone(lambda: self._exit(number, frame))
            return
        self._exit(number, frame)

    def _try_again(self, number: int) -> None:
        """Come back in a moment, when an exception gets through."""
        if self._retry_pending:  # A second signal: end at once, also from here.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._retry_pending = True
        main = threading.get_ident()

        def again() -> None:
            time.sleep(0.001)
            self._retry_pending = False
            if not self._begun:
                # A real signal, which also wakes the main thread from a blocking call.
                signal.pthread_kill(main, number)

        _thread.start_new_thread(again, ())

    def _exit(self, number: int, frame: FrameType | None) -> None:
        earlier = self.previous[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)
        if not PHASE.exiting:  # Otherwise it is ending already, with a status of its own.
            raise SystemExit(128 + number)


IMPORT_WAIT_S = 10.0
"""How long a signal waits for an import to end; then it is raised into it."""


def _would_be_lost(frame: FrameType | None, waited_s: float) -> bool:
    """Say whether an exception raised here may never arrive.

    Out of a destructor it is only printed. Out of an import it is swallowed now and then by
    the C++ of an extension module that is being initialised: one import of torch in ten.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_globals.get("__name__") == "importlib._bootstrap" and waited_s < IMPORT_WAIT_S:
            return True
        frame = frame.f_back
    return False


def exit_on_signals(*signals: int) -> SignalExit:
    """Turn signals into an orderly exit: everything is closed, exit status 128 + n.

    The default action of SIGTERM ends a process with nothing closed: no atexit callback, no
    destructor. With this, `SystemExit` is raised in the main thread: ``with`` blocks end, atexit
    callbacks run, open resources are closed. A signal in the middle of a release, of a
    destructor, or of an import (for `IMPORT_WAIT_S` seconds at most) waits for its end. A
    handler that a program had installed before is called first; Python's own for SIGINT is
    replaced. A second signal takes the default action and ends the program at once.

    Args:
        *signals: ``signal.SIGTERM`` (the default), ``SIGINT``, ``SIGHUP``, ...

    Returns:
        What restores the earlier handlers: call ``restore()``, or use it in a ``with`` block.

    Raises:
        SignalError: This is not the main thread, or a signal cannot be caught. No handler was
            changed.
    """
    numbers = tuple(dict.fromkeys(signals or (signal.SIGTERM,)))
    if threading.current_thread() is not threading.main_thread():
        raise SignalError(
            "exit_on_signals() works only in the main thread, where Python handles signals; "
            "call it there, before other threads are started"
        )
    for number in numbers:
        _check(number)
    return SignalExit(numbers)


def _check(number: int) -> None:
    uncatchable = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    try:
        name = signal.Signals(number).name
    except ValueError:
        raise SignalError(f"{number!r} is no signal of this system") from None
    if number in uncatchable:
        raise SignalError(f"{name} cannot be caught by any program; remove it")
