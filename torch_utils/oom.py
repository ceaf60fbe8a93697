"""Recognise out-of-memory errors, and clear the frames of their tracebacks."""

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
# Messages of allocators and libraries that raise a plain RuntimeError.
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
    # torch's message for ENOMEM if it cannot map shared memory or a file.
    f"Cannot allocate memory ({errno.ENOMEM})",
)


class Handled:
    """The exception that is being handled at one moment, with its causes and contexts.

    Python makes the handled exception the context of any exception that is raised meanwhile, even
    if the two are unrelated. This class tells older exceptions from newer ones.
    """

    def __init__(self, current: BaseException | None) -> None:
        self._older = list(walk_chain(current)) if current is not None else []

    def __contains__(self, error: object) -> bool:
        return any(error is older for older in self._older)

    def is_out_of_memory(self, exc: BaseException, *, contexts: bool = True) -> bool:
        """Return whether memory ran out in an exception that was raised since.

        Older contexts do not count. Older causes do, because the program named them by ``from``.
        """
        chain = walk_chain(exc, self, contexts=contexts)
        return exc not in self and any(map(_says_out_of_memory, chain))

    def clear_frames(self, exc: BaseException) -> int:
        """Clear the frames of exceptions that were raised since; see `clear_exception_frames`."""
        newer = (error for error in walk_chain(exc, self) if error not in self)
        return sum(map(_clear_frames_of, newer))


def walk_chain(
    error: BaseException, handled: Handled | None = None, *, contexts: bool = True
) -> Iterator[BaseException]:
    """Yield an exception and its causes, contexts and group members, each once.

    Args:
        error: The exception to start from.
        handled: Contexts that belong to it are skipped.
        contexts: Whether to follow contexts, which may be unrelated, at all.
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
        if contexts and (handled is None or current.__context__ not in handled):
            pending.append(current.__context__)
        pending += _members(current)


def _members(error: BaseException) -> list[Any]:
    try:
        members = getattr(error, "exceptions", None)
    except Exception:
        # A property of that name, in a class that is not a group, may raise anything.
        return []
    return list(members) if isinstance(members, (tuple, list)) else []


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an exception means that a device or the host ran out of memory.

    Args:
        exc: The exception. Its causes, contexts and group members are examined as well.

    Returns:
        True if one of them is an out-of-memory error. Imports nothing.
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
        # An argument whose str() raises is not the message of an allocator.
        return False
    return any(message in text for message in _RUNTIME_MESSAGES)


def clear_exception_frames(exc: BaseException) -> int:
    """Clear the local variables of all frames that an exception keeps alive.

    The traceback still prints as before. Frames that are still running keep their variables, as do
    those of generators and coroutines that handled the exception and continue. In Python 3.10 the
    frames of all generators and coroutines are kept. Safe from any thread.

    Args:
        exc: The exception. Its causes, contexts and group members are cleared as well.

    Returns:
        The number of frames that were cleared.
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
    """Clear a frame unless it is running, or a live generator or coroutine may own it.

    ``frame.clear()`` closes a suspended generator before Python 3.13, and raises from then on.
    """
    if frame.f_code.co_flags & _SUSPENDABLE and sys.version_info < (3, 13):
        # A frame refers to its code for the garbage collector once no generator owns it.
        owns_code = any(referent is frame.f_code for referent in gc.get_referents(frame))
        if sys.version_info < (3, 11) or not owns_code:
            return False
    try:
        frame.clear()
    except RuntimeError:  # It is running or suspended.
        return False
    if sys.version_info < (3, 13):
        _ = frame.f_locals  # Empties the dictionary that an earlier look at it has filled.
    return True
