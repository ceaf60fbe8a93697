"""exit_on_signals: end a program in order when it is told to end."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from torch_utils._runtime import PHASE, current_task
from torch_utils.errors import SignalError
from torch_utils.oom import walk_chain

__all__ = ["SignalExit", "exit_on_signals"]


class _OrderlyExit(SystemExit):
    """What a signal raises; of a class of its own, to be known again where it gets lost."""


class SignalExit:
    """The handlers that `exit_on_signals` installed; as a context manager it restores.

    Attributes:
        previous: The handlers that were there before, by signal.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.previous: dict[int, Any] = {}
        self._main = threading.get_ident()
        self._number: int | None = None  # the signal that came first
        self._first_s = 0.0  # when
        self._raised = False
        self._called = False
        self._retry_pending = False
        self._retry_s = 0.0005
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        try:
            for number in dict.fromkeys(numbers):
                self.previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
        except (OSError, ValueError, TypeError) as error:
            self.restore()
            raise SignalError(
                f"exit_on_signals() cannot handle {numbers}: {error}; call it in the main thread, "
                "with signals that can be caught, such as signal.SIGTERM"
            ) from None

    def restore(self) -> bool:
        """Put the earlier handlers back, where these are still in place.

        Returns:
            True if any was put back.
        """
        restored = False
        for number, handler in self.previous.items():
            if signal.getsignal(number) == self._handle or (
                self._raised and signal.getsignal(number) == signal.SIG_DFL
            ):
                # None is a handler that was not installed from Python and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
                restored = True
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook
        return restored

    def __enter__(self) -> SignalExit:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if self._number is None:
            self._number, self._first_s = number, time.monotonic()
        if _would_break_off(frame, waited_s=time.monotonic() - self._first_s):
            self._try_again()
            return
        for ours in self.previous:
            if signal.getsignal(ours) == self._handle:
                signal.signal(ours, signal.SIG_DFL)  # A second signal ends the program at once.
        self._exit(frame)

    def _try_again(self) -> None:
        """Come back in a moment, when an exception gets through."""
        number = self._number
        assert number is not None
        if self._retry_pending:  # A second signal: end at once, also from here.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._retry_pending = True
        self._retry_s = min(2 * self._retry_s, 0.05)

        def again() -> None:
            time.sleep(self._retry_s)
            self._retry_pending = False
            if not self._raised and not PHASE.exiting:
                # A real signal, which also wakes the main thread from a blocking call.
                signal.pthread_kill(self._main, number)

        _thread.start_new_thread(again, ())

    def _exit(self, frame: FrameType | None) -> None:
        number = self._number
        assert number is not None
        self._raised = True
        earlier = self.previous[number]
        if callable(earlier) and earlier is not signal.default_int_handler and not self._called:
            self._called = True  # Once, however often this gets lost.
            earlier(number, frame)
        # Otherwise the program is ending already, with a status of its own.
        if not PHASE.exiting and not _in_exit_callback(frame):
            task = current_task()
            if task is not None:
                task.add_done_callback(_take_note)
            raise _OrderlyExit(128 + number)

    def _unraisable(self, lost: Any) -> None:
        """Notice that what was raised got lost, and raise it again where it does not.

        That happens in weak references' callbacks, in the ``finally`` of a generator that is
        dropped, in ``gc.callbacks``, in ctypes callbacks: wherever C calls Python and has no way
        to pass an exception on.
        """
        error: BaseException | None = lost.exc_value
        if not (self._raised and isinstance(error, _OrderlyExit)):  # Not this one's.
            self._hook(lost)
        if PHASE.exiting or threading.get_ident() != self._main:
            return
        if error and any(isinstance(e, _OrderlyExit) for e in walk_chain(error)):
            self._raised = False
            self._arm_again()

    def _arm_again(self) -> None:
        if self._number is not None and signal.getsignal(self._number) == signal.SIG_DFL:
            signal.signal(self._number, self._handle)
            self._try_again()


def _take_note(task: Any) -> None:
    """Ask for what ended a task: one that nobody awaits would log it, and it ends the program."""
    if isinstance(getattr(task, "_exception", None), _OrderlyExit):
        task.exception()


IMPORT_WAIT_S = 10.0
"""How long a signal waits for an import to end; then it is raised into it."""


def _would_break_off(frame: FrameType | None, waited_s: float) -> bool:
    """Say whether an exception raised here would break off a destructor, or an import.

    Neither passes it on: out of a destructor it is printed, and what it was about to clean up
    stays; so it is out of the hook that would print it. Out of an import it is swallowed now and
    then by the C++ of an extension module that is being initialised: one import of torch in ten.
    """
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if name in ("__del__", "_abandoned") or (name == "__call__" and module == "weakref"):
            return True
        if frame.f_code is SignalExit._unraisable.__code__:
            return True
        if module == "importlib._bootstrap" and waited_s < IMPORT_WAIT_S:
            return True
        frame = frame.f_back
    return False


def _in_exit_callback(frame: FrameType | None) -> bool:
    """Say whether the program has come to its end by itself, and its exit callbacks run."""
    if threading.main_thread().is_alive():
        return False
    while frame is not None:
        # Before them, the main thread waits for the others, and that is ended.
        if frame.f_code is threading._shutdown.__code__:  # type: ignore[attr-defined]
            return False
        frame = frame.f_back
    return True


def exit_on_signals(*signals: int) -> SignalExit:
    """Turn signals into an orderly exit: everything is closed, exit status 128 + n.

    The default action of SIGTERM ends a process with nothing closed: no atexit callback, no
    destructor. With this, `SystemExit` is raised in the main thread: ``with`` blocks end, atexit
    callbacks run, open resources are closed. A signal in the middle of a release, of a
    destructor, or of an import (for `IMPORT_WAIT_S` seconds at most) waits for its end; not across
    an ``await``. Where Python would print the exception and go
    on, as in a weak reference's callback, nothing is printed and it is raised again a moment
    later: ``sys.unraisablehook`` is wrapped for that, and a hook that a program installs
    afterwards has to call it. A handler that a program
    had installed before is called first; Python's own for SIGINT is replaced. A second signal
    takes the default action and ends the program at once.

    Args:
        *signals: ``signal.SIGTERM`` (the default), ``SIGINT``, ``SIGHUP``, ...

    Returns:
        What restores the earlier handlers: call ``restore()``, or use it in a ``with`` block.

    Raises:
        SignalError: This is not the main thread, or a signal cannot be caught. No handler was
            changed.
    """
    return SignalExit(signals or (signal.SIGTERM,))
