"""Defer signals while the main thread closes a resource, and deliver them afterwards.

A signal handler may raise (Ctrl-C raises KeyboardInterrupt) between any two instructions, which
would leave a cleanup half done. While the main thread closes a resource, one handler replaces the
Python-level handlers of SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 and records each
signal. Afterwards the original handlers are restored and called in order. A second Ctrl-C is
delivered immediately, and a second SIGTERM after a second, because the cleanup may hang.
"""

from __future__ import annotations

# `signal` itself would double the time that importing this package takes.
import _signal as signal  # type: ignore[import-not-found]  # typeshed has no stub
import sys
from _signal import getsignal
from _thread import get_ident
from math import inf
from os import getpid
from time import monotonic
from weakref import WeakSet

from torch_utils._runtime import MODULES, PHASE, early_bound, is_finalizing

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HANDLERS: dict[int, Any] = {}  # the program's own, by signal
_PATIENCE_S = {signal.SIGINT: 0.0, signal.SIGTERM: 1.0}
"""How long after the first a second signal waits as well; others always do."""
_NOTED: list[int] = []
_FIRST_S: dict[int, float] = {}  # when each noted signal came
_BLOCKS: WeakSet[DeferredSignals] = WeakSet()  # the block that has replaced handlers
_PIDS = [0]  # the process that entered it


def _is_stale() -> bool:
    """Return whether no block of this process is open: one never ended, or there was a fork."""
    return not _BLOCKS or getpid() != _PIDS[0]


def _note(number: int, frame: FrameType | None) -> None:
    if _is_stale():
        _put_back()
        _NOTED.clear()
    elif number not in _NOTED or monotonic() - _FIRST_S[number] < _PATIENCE_S.get(number, inf):
        if number not in _NOTED:
            _FIRST_S[number] = monotonic()
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
        _BLOCKS.clear()
    except BaseException:  # A restored handler raised; restore the others.
        _put_back()
        raise


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
        if is_finalizing() or (threading and get_ident() != threading.main_thread().ident):
            return
        if not _is_stale():
            return
        try:
            _put_back()
            _NOTED.clear()
            _PIDS[0] = getpid()
            for number in _SIGNALS:
                handler = getsignal(number)
                if callable(handler) and getattr(handler, "is_deferred", True):
                    _BLOCKS.add(self)
                    _HANDLERS[number] = handler
                    signal.signal(number, _note)
        except ValueError:  # In a subinterpreter signals cannot be deferred.
            _put_back()
        except BaseException:  # A handler raised before anything was closed.
            _put_back()
            raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self not in _BLOCKS:
            return
        try:
            _put_back()
        finally:
            if PHASE.exiting:  # The program is ending already.
                _NOTED.clear()
            _call_handlers()
