"""Which opening of a scope a call is in, where one scope is open many times at once."""

from __future__ import annotations

from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol, TypeVar

Key = tuple[int, int]  # a frame, and its code


class Opening(Protocol):
    """What tells one opening from another.

    Attributes:
        frame: That of the with statement that opened it.
        outside: The openings around it, which it was entered in.
    """

    frame: Key
    outside: tuple[Any, ...]


T = TypeVar("T", bound=Opening)

ENTERED: ContextVar[tuple[Any, ...]] = ContextVar("entered_scopes", default=())
"""What was opened in this context and those that it was copied from; some may have ended."""


def find_current(candidates: list[T], frame: FrameType | None) -> T | None:
    """Find the opening that a caller is in, or None where that cannot be told.

    That is the one whose with statement is the innermost around the call; for another thread
    and task, the innermost of those whose context it has; otherwise the only one there is.
    """
    if len(candidates) == 1:
        return candidates[0]
    by_frame = {opened.frame: opened for opened in candidates}
    for key in frames_of(frame):
        if key in by_frame:
            return by_frame[key]
    here = [opened for opened in ENTERED.get() if opened in candidates]
    outside = {id(outer) for opened in here for outer in opened.outside}
    innermost = [o for o in candidates if o in here and id(o) not in outside] or candidates
    return innermost[0] if len(innermost) == 1 else None


def frame_key(frame: FrameType) -> tuple[int, int]:
    """Tell frames apart without keeping them, and what they hold, alive.

    An address may be used again, but then by a later call; the newest opening is the one meant.
    """
    return id(frame), id(frame.f_code)


def frames_of(frame: FrameType | None) -> list[tuple[int, int]]:
    # No generator: an interrupt that comes when one is dropped would be printed and lost.
    keys = []
    while frame is not None:
        keys.append(frame_key(frame))
        frame = frame.f_back
    return keys
