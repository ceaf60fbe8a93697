"""Defer signals while the main thread closes a resource, and deliver them afterwards.

A signal handler may raise (Ctrl-C raises KeyboardInterrupt) between any two instructions, which
would leave a cleanup half done. While the main thread closes a resource, one handler replaces the
Python-level handlers of SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 and records each
signal. Afterwards the original handlers are restored and called in order. A second Ctrl-C is
delivered immediately, because the cleanup may hang.
"""

from __future__ import annotations

# `signal` and `functools` themselves would double the time that importing this package takes.
import _signal as signal  # type: ignore[import-not-found]  # typeshed has no stub
import sys
from _functools import partial  # type: ignore[import-not-found]  # nor here
from _signal import SIGINT, getsignal
from _thread import get_ident, interrupt_main
from os import getpid
from weakref import WeakSet, ref

from torch_utils._runtime import MODULES, PHASE, early_bound, is_finalizing

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HANDLERS: dict[int, Any] = {}  # the program's own, by signal
_NOTED: list[int] = []
_BLOCKS: WeakSet[DeferredSignals] = WeakSet()  # those that have replaced handlers
_PIDS = [0]  # the process that entered the blocks


def _note(number: int, frame: FrameType | None) -> None:
    if not _BLOCKS or getpid() != _PIDS[0]:
        _put_back_stale()
    elif number != SIGINT or number not in _NOTED:
        _NOTED.append(number)
        return
    else:
        _NOTED.remove(number)
    _HANDLERS[number](number, frame)


def _put_back_stale() -> None:
    """Restore handlers of blocks that never ended because of a RecursionError or a fork."""
    _BLOCKS.clear()
    _NOTED.clear()
    for number, handler in list(_HANDLERS.items()):
        if getsignal(number) is _note:
            signal.signal(number, handler)


def _call_handlers(numbers: list[int]) -> None:
    # The signals are not sent again, because an event loop has received them already.
    try:
        while numbers:
            number = numbers.pop(0)
            _HANDLERS[number](number, sys._getframe())
    finally:
        if numbers:  # A handler raised; call the others.
            _call_handlers(numbers)


class _SentAtEnd:
    """Send a signal when this object is destroyed."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, number: int) -> None:
        # The callback is C code: a Python function would receive the signal itself.
        send = map(interrupt_main, [number])  # type: ignore[arg-type]  # typeshed wants a Signals
        self._end = ref(self, partial(next, send))


class DeferredSignals:
    """Context manager that runs the program's signal handlers after the block.

    Blocks nest; the outermost one restores the handlers. A block in another thread does nothing,
    because handlers run only in the main thread.

    Args:
        in_destructor: Deliver the signals when this object is destroyed. Python discards an
            exception that is raised in a destructor, so the destructor keeps this object in a
            local variable.
    """

    __slots__ = ("__weakref__", "_held", "_in_destructor", "_sent_at_end")

    def __init__(self, in_destructor: bool = False) -> None:
        self._in_destructor = in_destructor
        self._held: dict[int, Any] = {}

    @early_bound
    def __enter__(self) -> None:
        threading = MODULES.get("threading")
        if is_finalizing() or (threading and get_ident() != threading.main_thread().ident):
            return
        try:
            self._replace()
        except ValueError:  # In a subinterpreter signals cannot be deferred.
            self._put_back()
        except BaseException:  # A handler raised before anything was closed.
            self._put_back()
            raise

    def _replace(self) -> None:
        if not _BLOCKS or getpid() != _PIDS[0]:
            _put_back_stale()
        _PIDS[0] = getpid()
        for number in _SIGNALS:
            handler = getsignal(number)
            if callable(handler) and handler is not _note:
                _BLOCKS.add(self)
                self._held[number] = _HANDLERS[number] = handler
                signal.signal(number, _note)

    @early_bound
    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if not self._held:
            return
        try:
            self._put_back()
        finally:
            if PHASE.exiting:  # The program is ending already.
                _NOTED.clear()
            elif _NOTED:
                self._deliver()

    def _put_back(self) -> None:
        try:
            for number, handler in list(self._held.items()):
                if getsignal(number) is _note:
                    signal.signal(number, handler)
            _BLOCKS.discard(self)
        except BaseException:  # A restored handler raised; restore the others.
            self._put_back()
            raise

    def _deliver(self) -> None:
        mine = [number for number in _NOTED if number in self._held]
        _NOTED[:] = [number for number in _NOTED if number not in self._held]
        if self._in_destructor:
            self._sent_at_end = [_SentAtEnd(number) for number in mine]
        else:
            _call_handlers(mine)
