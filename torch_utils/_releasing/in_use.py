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
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, count
from types import FrameType
from typing import Any, NamedTuple

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


class _Kept(NamedTuple):
    """What may be in use.

    Attributes:
        tensors: Of which nothing else may remain.
        places: Where each other thread was that may be inside of one; None if that is not known
            yet, because they are only being taken out.
        thread: The one that takes them out.
    """

    tensors: list[Any]
    places: dict[int, Place] | None
    thread: int


_KEPT: dict[int, _Kept] = {}
_numbers = count()


def swap_all(
    swap: Callable[[Any, Any], None], tensors: Sequence[Any], others: list[Any], references: int
) -> None:
    """Swap the C++ tensors of two lists, and keep those of the first that may be in use.

    Until every thread that may be using one now has moved on; costs next to nothing in a program
    of one thread. What is still kept when a release ends goes with a later garbage collection, of
    any generation, or a later release. To be called again after an interrupt.

    Args:
        swap: What does it with two objects.
        tensors: Their objects have the C++ tensors of ``others`` afterwards,
        others: and these theirs.
        references: How many of the references to each of the first the caller and the release
            have. A thread at work with a tensor has one more, and so has the program's variable.
    """
    number = next(_numbers)
    # Before: if this is interrupted from here on, the next look decides.
    _KEPT[number] = _Kept(others, None, _thread.get_ident())
    deque(map(swap, tensors, others), maxlen=0)
    # After: whoever begins to use one of the objects from here on uses nothing that was taken out.
    counts = list(map(sys.getrefcount, tensors))
    references += 1  # That of the call of getrefcount.
    places = _places_of_others() if max(counts) > references else {}
    if places:
        own = _variables() if references + 1 in counts else frozenset()
        is_used = [
            count > references + 1 or (count > references and id(tensor) not in own)
            for tensor, count in zip(tensors, counts, strict=True)
        ]
        used = list(compress(others, is_used))
        if used:
            _KEPT[number] = _Kept(used, places, 0)
            if _after_collection not in gc.callbacks:
                gc.callbacks.append(_after_collection)
            return
    _KEPT.pop(number, None)  # A destructor that releases may have decided already.


def _variables() -> frozenset[int]:
    """Collect the ids of what the functions that led here have in variables, and their modules.

    A reference of theirs is none of a thread at work.
    """
    found: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        namespace = frame.f_globals
        name = namespace.get("__name__")
        if not (type(name) is str and name.partition(".")[0] == _PACKAGE):
            found.update(id(value) for _, value in variables_of(frame))
            found.update(map(id, list(namespace.values())))
        frame = frame.f_back
    return frozenset(found)


def is_any_kept() -> bool:
    """Say whether a tensor is kept for a thread that has not moved on."""
    return bool(_KEPT)


def settle(wait_s: float = WAIT_S) -> bool:
    """Drop what no thread can be using any more, and wait a little for the others.

    Returns:
        True if nothing is kept any longer.
    """
    _adopt_interrupted()
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
    for number, kept in list(_KEPT.items()):
        places = kept.places
        if places is None:
            continue  # They are being taken out at this moment.
        for thread, place in list(places.items()):
            if now.get(thread) != place:
                places.pop(thread, None)  # Once is enough: later calls find an empty tensor.
        if not places:
            _KEPT.pop(number, None)


def _adopt_interrupted() -> None:
    """Take over what this thread was taking out when it was interrupted."""
    thread = _thread.get_ident()
    for number, kept in list(_KEPT.items()):
        if kept.places is None and kept.thread == thread:
            _KEPT[number] = kept._replace(places=_places_of_others())


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        _drop_unused()
        if not _KEPT and _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)
