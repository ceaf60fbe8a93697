"""Tensors that another thread may be inside of, kept until it has moved on.

A method of a tensor (``tensor.sort()``, ``tensor + 1``) works without the GIL on a C++ tensor that
it only borrows from the Python object. Who takes the C++ tensor out of that object meanwhile
must not be the last to let go of it. Functions (``torch.sort(tensor)``) hold a share of their own.
"""

from __future__ import annotations

import _thread
import gc
import sys
import time
from itertools import count
from types import FrameType
from typing import Any

from torch_utils._frames import variables_of

WAIT_S = 0.02
_LOOK_EVERY_S = 0.001

_PACKAGE = __name__.partition(".")[0]
Place = tuple[int, int]  # a frame, by its id, and the instruction in it

# Threads that wait there are inside no tensor, and may wait for ever.
_WAITING = frozenset(
    (
        *(("threading", "wait"), ("threading", "_wait_for_tstate_lock"), ("threading", "join")),
        *(("queue", "get"), ("subprocess", "_try_wait"), ("execnet.gateway_base", "read")),
        *(("concurrent.futures.thread", "_worker"), ("selectors", "select")),
        *(("multiprocessing.connection", "_recv"), ("socket", "accept"), ("socket", "readinto")),
    )
)
_KEPT: dict[int, tuple[Any, dict[int, Place]]] = {}
_numbers = count()


def is_own_variable(thing: Any) -> bool:
    """Say whether a variable of the functions that led here, or of their modules, has a thing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        namespace = frame.f_globals
        name = namespace.get("__name__")
        if not (type(name) is str and name.partition(".")[0] == _PACKAGE) and (
            any(value is thing for _, value in variables_of(frame))
            or any(value is thing for value in list(namespace.values()))
        ):
            return True
        frame = frame.f_back
    return False


def keep_while_used(tensor: Any) -> None:
    """Keep a tensor object until every thread that may be using it now has moved on.

    Costs nothing in a program of one thread. What is still kept when a release ends goes with a
    later garbage collection, of any generation, or a later release.
    """
    places = _places_of_others()
    if places:
        _KEPT[next(_numbers)] = (tensor, places)
        if _after_collection not in gc.callbacks:
            gc.callbacks.append(_after_collection)


def is_any_kept() -> bool:
    """Say whether a tensor is kept for a thread that has not moved on."""
    return bool(_KEPT)


def settle(wait_s: float = WAIT_S) -> bool:
    """Drop what no thread can be using any more, and wait a little for the others.

    Returns:
        True if nothing is kept any longer.
    """
    stop = time.perf_counter() + wait_s
    while _KEPT:
        _drop_unused()
        if not _KEPT or time.perf_counter() >= stop:
            break
        time.sleep(_LOOK_EVERY_S)
    return not _KEPT


def _places_of_others() -> dict[int, Place]:
    """Say where each other thread is that may be inside C++ code."""
    frames = sys._current_frames()
    frames.pop(_thread.get_ident(), None)
    return {
        thread: (id(frame), frame.f_lasti)
        for thread, frame in frames.items()
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) not in _WAITING
    }


def _drop_unused() -> None:
    now = _places_of_others()
    for number, (_, places) in list(_KEPT.items()):
        for thread, place in list(places.items()):
            if now.get(thread) != place:
                places.pop(thread, None)  # Once is enough: later calls find an empty tensor.
        if not places:
            _KEPT.pop(number, None)


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        _drop_unused()
        if not _KEPT and _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)
