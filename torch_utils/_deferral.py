"""Signals wait while something is being closed, and are delivered right after it.

A signal handler may raise (Ctrl-C raises KeyboardInterrupt), and it may run between any two
instructions, so it would leave a cleanup half done. While the main thread closes something, the
Python-level handlers of SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 are replaced by one
that notes the signal. Then they are put back and called, in order. The second Ctrl-C is delivered
at once, because what is being closed may hang.
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
_PIDS = [0]  # the process whose blocks they are


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
    """Put handlers back whose block will not: a RecursionError skipped its end, or a fork."""
    _BLOCKS.clear()
    _NOTED.clear()
    for number, handler in list(_HANDLERS.items()):
        if getsignal(number) is _note:
            signal.signal(number, handler)


def _call_handlers(numbers: list[int]) -> None:
    # Not by sending the signals again: an event loop has been told of them already.
    try:
        while numbers:
            number = numbers.pop(0)
            _HANDLERS[number](number, sys._getframe())
    finally:
        if numbers:  # A handler has raised: the others follow.
            _call_handlers(numbers)


class _SentAtEnd:
    """A signal that is sent when this object ends."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, number: int) -> None:
        # A weak reference calls C here. A function in Python would receive the signal itself.
        send = map(interrupt_main, [number])  # type: ignore[arg-type]  # typeshed wants a Signals
        self._end = ref(self, partial(next, send))


class DeferredSignals:
    """Context manager: the program's signal handlers run after the block, and not in it.

    Blocks nest: the outermost puts the handlers back. A block in another thread changes nothing,
    because handlers run in the main thread only.

    Args:
        in_destructor: Deliver when this object ends. An exception that is raised in a destructor
            gets lost, so the destructor keeps this object in a variable.
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
        except ValueError:  # Not the main interpreter: signals cannot be put off.
            self._put_back()
        except BaseException:  # A handler raised in between: nothing has been closed yet.
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
            if PHASE.exiting:  # There is nothing left that a signal could end.
                _NOTED.clear()
            elif _NOTED:
                self._deliver()

    def _put_back(self) -> None:
        try:
            for number, handler in list(self._held.items()):
                if getsignal(number) is _note:
                    signal.signal(number, handler)
            _BLOCKS.discard(self)
        except BaseException:  # A handler that is back has raised: the others follow.
            self._put_back()
            raise

    def _deliver(self) -> None:
        mine = [number for number in _NOTED if number in self._held]
        _NOTED[:] = [number for number in _NOTED if number not in self._held]
        if self._in_destructor:
            self._sent_at_end = [_SentAtEnd(number) for number in mine]
        else:
            _call_handlers(mine)
