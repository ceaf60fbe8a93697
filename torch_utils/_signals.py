"""Signals: turn them into an orderly exit, and defer them while a resource is being closed.

A signal handler may raise (Ctrl-C raises KeyboardInterrupt) between any two instructions, which
would leave a cleanup half done. While the main thread closes a resource, one handler replaces the
Python-level handlers of SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 and records each
signal. Afterwards the original handlers are restored and called in order. A second Ctrl-C is
delivered immediately, because the cleanup may hang.
"""

from __future__ import annotations

# `signal` itself would double the time that importing this package takes.
import _signal as signal  # type: ignore[import-not-found]  # typeshed has no stub
import os
import sys
from _signal import getsignal
from _thread import get_ident
from time import monotonic
from weakref import ref

from torch_utils._runtime import MODULES, Phase, current_task, early_bound, is_finalizing
from torch_utils.errors import SignalError

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

REPEAT_S = 1.0
"""For how long further signals count as the first one: `timeout` sends each one twice."""
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HANDLERS: dict[int, Any] = {}  # the program's own, by signal
_NOTED: list[int] = []
_OPEN: list[ref[DeferredSignals]] = []  # the block that has replaced handlers, while it exists


def _note(number: int, frame: FrameType | None) -> None:
    if not _OPEN:  # The block never ended.
        _put_back()
        _NOTED.clear()
    elif number != signal.SIGINT or number not in _NOTED:
        _NOTED.append(number)
        return
    else:
        _NOTED.remove(number)
    _HANDLERS[number](number, frame)


def _put_back() -> None:
    try:
        for number, handler in list(_HANDLERS.items()):
            if getsignal(number) is _note:
                signal.signal(number, handler)
        _OPEN.clear()
    except BaseException:  # A restored handler raised; restore the others.
        _put_back()
        raise


if hasattr(os, "register_at_fork"):  # A child has none of its parent's blocks and signals.
    os.register_at_fork(after_in_child=_put_back)
    os.register_at_fork(after_in_child=_NOTED.clear)


def _call_handlers() -> None:
    # The signals are not sent again, because an event loop has received them already.
    try:
        while _NOTED:
            number = _NOTED.pop(0)
            _HANDLERS[number](number, sys._getframe())
    finally:
        if _NOTED:  # A handler raised; call the others.
            _call_handlers()


@early_bound
class DeferredSignals:
    """Context manager that runs the program's signal handlers after the block.

    Blocks nest; only the outermost one replaces handlers. A block in another thread does nothing,
    because handlers run only in the main thread.
    """

    __slots__ = ("__weakref__",)

    def __enter__(self) -> None:
        threading = MODULES.get("threading")
        is_elsewhere = threading and get_ident() != threading.main_thread().ident
        if _OPEN or is_finalizing() or is_elsewhere:
            return
        try:
            _put_back()
            _NOTED.clear()
            _OPEN.append(ref(self, _OPEN.remove))
            # asyncio's own handler does nothing. To replace it would interrupt system calls from
            # then on, because `signal.signal` clears the flag SA_RESTART, which asyncio sets.
            of_loop = getattr(MODULES.get("asyncio.unix_events"), "_sighandler_noop", None)
            for number in _SIGNALS:
                handler = getsignal(number)
                is_deferred = handler is not of_loop and getattr(handler, "is_deferred", True)
                if callable(handler) and is_deferred:
                    _HANDLERS[number] = handler
                    signal.signal(number, _note)
        except BaseException as error:  # A handler raised before anything was closed.
            _put_back()
            if not isinstance(error, ValueError):  # In a subinterpreter nothing can be deferred.
                raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if not _OPEN or _OPEN[0]() is not self:
            return
        try:
            _put_back()
        finally:
            if Phase.exiting:  # The program is ending already.
                _NOTED.clear()
            if _NOTED:
                _call_handlers()


class SignalExit:
    """The handlers that `exit_on_signals` installed.

    Leaving its ``with`` block restores the earlier ones.

    Attributes:
        previous: The earlier handlers, by signal.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.previous: dict[int, Any] = {}
        self._first_s = 0.0
        try:
            for number in dict.fromkeys(numbers):
                self.previous[number] = getsignal(number)
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
            if getsignal(number) in (self._handle, self._end_program):
                # None is a handler in C, which Python cannot restore.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
                restored = True
        return restored

    def __enter__(self) -> SignalExit:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._first_s = monotonic()
        for ours in self.previous:
            if getsignal(ours) == self._handle:
                signal.signal(ours, self._end_program)
        earlier = self.previous[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)
        if not _runs_exit_callbacks(frame):  # They end the program, with its own exit status.
            task = current_task()
            if task is not None:  # So that asyncio does not log the exception as unretrieved.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise SystemExit(128 + number)

    def _end_program(self, number: int, frame: FrameType | None) -> None:
        """Handle the second signal."""
        if monotonic() - self._first_s > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    _end_program.is_deferred = False  # type: ignore[attr-defined]  # A cleanup may hang.


def _runs_exit_callbacks(frame: FrameType | None) -> bool:
    """Return whether the main thread runs exit callbacks, from a frame of that thread."""
    threading = MODULES.get("threading")
    if threading is None or threading.main_thread().is_alive():
        return Phase.exiting
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    # Before the exit callbacks, Python joins the other threads.
    return frame is None or frame.f_code is not threading._shutdown.__code__


def exit_on_signals(*signals: int) -> SignalExit:
    """Turn signals into an orderly exit with the exit status 128 + n.

    The default action of SIGTERM ends a process without exit callbacks or destructors. With this
    function, a signal raises `SystemExit` in the main thread: ``with`` blocks end, exit callbacks
    run and open resources are closed.

    A signal during a release waits until that ends. One during the exit callbacks does not break
    them off. An earlier handler of the program is called first; Python's own handler for SIGINT is
    replaced. More than a second later, a second signal takes the default action and ends
    the program immediately. Python discards exceptions in destructors, in callbacks of weak
    references and in some imports of extension modules. There this one is lost as well, and only
    the second signal ends the program.

    Args:
        *signals: The signals to handle, such as ``signal.SIGINT``; ``signal.SIGTERM`` by default.

    Returns:
        An object that restores the earlier handlers, by ``restore()`` or in a ``with`` block.

    Raises:
        SignalError: This is not the main thread, or a signal cannot be caught. No handler was
            changed.
    """
    return SignalExit(signals or (signal.SIGTERM,))
