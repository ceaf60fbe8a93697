"""Out-of-memory errors: recognise them, and let go of what their tracebacks hold."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Iterator
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Any

from torch_utils._runtime import loaded_torch

__all__ = ["clear_exception_frames", "is_out_of_memory"]

_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
# What the allocators and libraries say, where the exception's type does not.
_RUNTIME_MESSAGES = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "std::bad_alloc",
    # ENOMEM, as torch words it when shared memory or a file cannot be mapped.
    f"Cannot allocate memory ({errno.ENOMEM})",
)


class Handled:
    """An exception that is being handled at one moment, and all that hangs on it.

    What is raised while an exception is handled gets that one as its context, however little
    the two have to do with each other: this tells the older ones apart.
    """

    def __init__(self, current: BaseException | None) -> None:
        self._older = list(walk_chain(current)) if current is not None else []

    def __contains__(self, error: object) -> bool:
        return any(error is older for older in self._older)

    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Say whether memory ran out in what was raised since: contexts from before do not count.

        A cause does, however old: who raises an error ``from`` another says that it was that.
        """
        return exc not in self and any(map(_says_out_of_memory, walk_chain(exc, self)))

    def clear_frames(self, exc: BaseException) -> int:
        """Let go of the local variables of what was raised since; see `clear_exception_frames`."""
        newer = (error for error in walk_chain(exc, self) if error not in self)
        return sum(map(_clear_frames_of, newer))


def walk_chain(error: BaseException, handled: Handled | None = None) -> Iterator[BaseException]:
    """Yield an exception and all that hangs on it: causes, contexts, members of groups.

    Each once, also where they form a cycle. Both branches are followed: ``__cause__`` does not
    replace ``__context__``, which stays alive beside it. Contexts that were being handled
    before are left out.
    """
    seen: set[int] = set()
    pending: list[Any] = [error]
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending.append(current.__cause__)
        if handled is None or current.__context__ not in handled:
            pending.append(current.__context__)
        pending += _members(current)


def _members(error: BaseException) -> list[Any]:
    try:
        members = getattr(error, "exceptions", None)
    except Exception:
        # No group, but a class with a property of that name, which may raise what it likes.
        return []
    return list(members) if isinstance(members, (tuple, list)) else []


def is_out_of_memory(exc: BaseException) -> bool:
    """Say whether memory, of a device or of the host, ran out.

    Looks through causes, contexts and groups. Imports nothing.
    """
    return any(map(_says_out_of_memory, walk_chain(exc)))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):  # numpy's _ArrayMemoryError derives from it.
        return True
    kind = getattr(loaded_torch(), "OutOfMemoryError", None)
    if isinstance(kind, type) and isinstance(error, kind):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = " ".join(str(argument) for argument in error.args)
    except Exception:
        # An argument of the program's own, which cannot be shown: no allocator's message.
        return False
    return any(message in text for message in _RUNTIME_MESSAGES)


def clear_exception_frames(exc: BaseException) -> int:
    """Let go of the local variables in every frame that an exception keeps alive.

    Follows causes, contexts and groups. Frames that are still running are left alone, and so
    are those of generators and coroutines that go on after they have handled the exception; in
    Python 3.10 those of all generators and coroutines. The traceback prints as before: it needs
    the code and the lines, not the variables. Safe from any thread.

    Returns:
        How many frames were cleared.
    """
    return sum(map(_clear_frames_of, walk_chain(exc)))


def _clear_frames_of(error: BaseException) -> int:
    cleared = 0
    traceback = error.__traceback__
    while traceback is not None:
        cleared += _clear(traceback.tb_frame)
        traceback = traceback.tb_next
    return cleared


def _clear(frame: FrameType) -> bool:
    """Clear a frame, unless it is running, or a generator or coroutine that lives may own it.

    ``frame.clear()`` closes suspended ones in Python below 3.13, and refuses from there on.
    """
    if frame.f_code.co_flags & _SUSPENDABLE and sys.version_info < (3, 13):
        # A frame refers to its code for the garbage collector once it belongs to no generator.
        owns_code = any(referent is frame.f_code for referent in gc.get_referents(frame))
        if sys.version_info < (3, 11) or not owns_code:
            return False
    try:
        frame.clear()
    except RuntimeError:  # It is running, or suspended.
        return False
    return True
