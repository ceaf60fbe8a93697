"""exit_on_signals: turn signals into an orderly exit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from torch_utils._runtime import PHASE, current_task
from torch_utils.errors import SignalError

__all__ = ["SignalExit", "exit_on_signals"]

REPEAT_S = 1.0
"""For how long further signals count as the first one: `timeout` sends each one twice."""


class SignalExit:
    """The handlers that `exit_on_signals` installed.

    Leaving its ``with`` block restores the earlier ones.

    Attributes:
        previous: The earlier handlers, by signal.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.previous: dict[int, Any] = {}
        self._second = _EndProgram()
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
            if signal.getsignal(number) in (self._handle, self._second):
                # None is a handler in C, which Python cannot restore.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
                restored = True
        return restored

    def __enter__(self) -> SignalExit:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._second.first_s = time.monotonic()
        for ours in self.previous:
            if signal.getsignal(ours) == self._handle:
                signal.signal(ours, self._second)
        earlier = self.previous[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)
        if not _runs_exit_callbacks(frame):  # They end the program, with its own exit status.
            task = current_task()
            if task is not None:  # So that asyncio does not log the exception as unretrieved.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise SystemExit(128 + number)


def _runs_exit_callbacks(frame: FrameType | None) -> bool:
    """Return whether the main thread runs exit callbacks, from a frame of that thread."""
    if threading.main_thread().is_alive():
        return PHASE.exiting
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    # Before the exit callbacks, Python joins the other threads.
    return frame is None or frame.f_code is not threading._shutdown.__code__  # type: ignore[attr-defined]


class _EndProgram:
    """The handler after the first signal. It is never deferred, because a cleanup may hang."""

    is_deferred = False

    def __init__(self) -> None:
        self.first_s = time.monotonic()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.first_s > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def exit_on_signals(*signals: int) -> SignalExit:
    """Turn signals into an orderly exit with the exit status 128 + n.

    The default action of SIGTERM ends a process without exit callbacks or destructors. With this
    function, a signal raises `SystemExit` in the main thread: ``with`` blocks end, exit callbacks
    run and open resources are closed.

    A signal during a release waits until that ends. One during the exit callbacks does not break
    them off. An earlier handler of the program is called first; Python's own handler for SIGINT is
    replaced. More than `REPEAT_S` seconds later, a second signal takes the default action and ends
    the program immediately. Python discards exceptions in
    destructors, in callbacks of weak references and in some imports of extension modules. There
    this one is lost as well, and only the second signal ends the program.

    Args:
        *signals: The signals to handle, such as ``signal.SIGINT``; ``signal.SIGTERM`` by default.

    Returns:
        An object that restores the earlier handlers, by ``restore()`` or in a ``with`` block.

    Raises:
        SignalError: This is not the main thread, or a signal cannot be caught. No handler was
            changed.
    """
    return SignalExit(signals or (signal.SIGTERM,))
