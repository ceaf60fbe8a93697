"""exit_on_signals: turn signals into an orderly exit."""

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
    """The exception of a signal; a class of its own, so that a lost one can be recognised."""


class SignalExit:
    """The handlers that `exit_on_signals` installed.

    Leaving its ``with`` block restores the earlier ones.

    Attributes:
        previous: The earlier handlers, by signal.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.previous: dict[int, Any] = {}
        self._main = threading.get_ident()
        self._number: int | None = None  # the first signal
        self._first_s = 0.0  # its time
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
                f"exit_on_signals() cannot handle {numbers}: {error}; call it in the main thread "
                "with signals that can be caught, such as signal.SIGTERM"
            ) from None

    def restore(self) -> bool:
        """Restore the earlier handlers of signals that still have this object's handler.

        Returns:
            True if a handler was restored.
        """
        restored = False
        for number, handler in self.previous.items():
            if signal.getsignal(number) == self._handle or (
                self._raised and signal.getsignal(number) == signal.SIG_DFL
            ):
                # None is a handler in C, which Python cannot restore.
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
                signal.signal(ours, signal.SIG_DFL)  # A second signal ends the program immediately.
        self._exit(frame)

    def _try_again(self) -> None:
        """Send the signal again in a moment, when an exception can pass."""
        number = self._number
        assert number is not None
        if self._retry_pending:  # A second signal ends the program immediately.
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
            self._called = True  # Once, even if the exception gets lost.
            earlier(number, frame)
        # Otherwise the program is ending already, with its own exit status.
        if not PHASE.exiting and not _in_exit_callback(frame):
            task = current_task()
            if task is not None:
                task.add_done_callback(_take_note)
            raise _OrderlyExit(128 + number)

    def _unraisable(self, lost: Any) -> None:
        """Notice that Python discarded the exception, and raise it again later.

        This happens where C code cannot propagate an exception: in callbacks of weak references,
        `gc.callbacks` and ctypes, and in the ``finally`` block of a generator that is dropped.
        """
        error: BaseException | None = lost.exc_value
        if not (self._raised and isinstance(error, _OrderlyExit)):  # Another exception.
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
    """Retrieve the exception of a task, so that asyncio does not log it as unretrieved."""
    if isinstance(getattr(task, "_exception", None), _OrderlyExit):
        task.exception()


IMPORT_WAIT_S = 10.0
"""How long a signal waits for an import to end before it interrupts it."""


def _would_break_off(frame: FrameType | None, waited_s: float) -> bool:
    """Return whether an exception raised here would interrupt a destructor or an import.

    Python prints an exception of a destructor, or of the hook that prints it, and continues with
    the cleanup half done. The C++ code of an extension module that is being imported sometimes
    swallows it: in one import of torch in ten.
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
    """Return whether the program is ending by itself and its exit callbacks run."""
    if threading.main_thread().is_alive():
        return False
    while frame is not None:
        # While the main thread still waits for other threads, the signal ends that wait.
        if frame.f_code is threading._shutdown.__code__:  # type: ignore[attr-defined]
            return False
        frame = frame.f_back
    return True


def exit_on_signals(*signals: int) -> SignalExit:
    """Turn signals into an orderly exit with the exit status 128 + n.

    The default action of SIGTERM ends a process without exit callbacks or destructors. With this
    function, a signal raises `SystemExit` in the main thread: ``with`` blocks end, exit callbacks
    run and open resources are closed.

    A signal during a release, a destructor or an import waits until that ends, for an import at
    most `IMPORT_WAIT_S` seconds. It does not wait across an ``await``. Where Python would print the
    exception and continue, such as in a callback of a weak reference, it is raised again a moment
    later. For this, `sys.unraisablehook` is wrapped; a hook that is installed later must call it.

    An earlier handler of the program is called first; Python's own handler for SIGINT is replaced.
    A second signal takes the default action and ends the program immediately.

    Args:
        *signals: The signals to handle, such as ``signal.SIGINT``; ``signal.SIGTERM`` by default.

    Returns:
        An object that restores the earlier handlers, by ``restore()`` or in a ``with`` block.

    Raises:
        SignalError: This is not the main thread, or a signal cannot be caught. No handler was
            changed.
    """
    return SignalExit(signals or (signal.SIGTERM,))
