"""Out-of-memory errors: recognise them, and let go of what their tracebacks hold."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["clear_exception_frames", "is_out_of_memory"]

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
)


def walk_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that hangs on it: causes, contexts, members of groups.

    Each once, also where they form a cycle. Both branches are followed: ``__cause__`` does not
    replace ``__context__``, which stays alive beside it.
    """
    seen: set[int] = set()
    pending: list[Any] = [error]
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += (current.__cause__, current.__context__)
        members = getattr(current, "exceptions", None)
        if isinstance(members, (tuple, list)):
            pending += members


def is_out_of_memory(exc: BaseException) -> bool:
    """Say whether memory, of a device or of the host, ran out.

    Looks through causes, contexts and groups. Imports nothing.
    """
    return any(_says_out_of_memory(error) for error in walk_chain(exc))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):  # numpy's _ArrayMemoryError derives from it.
        return True
    torch: Any = sys.modules.get("torch")
    kind = getattr(torch, "OutOfMemoryError", None)
    if isinstance(kind, type) and isinstance(error, kind):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = " ".join(str(argument) for argument in error.args)
    return any(message in text for message in _RUNTIME_MESSAGES)


def clear_exception_frames(exc: BaseException) -> int:
    """Let go of the local variables in every frame that an exception keeps alive.

    Follows causes, contexts and groups. Frames that are still running are left alone. The
    traceback prints as before: it needs the code and the lines, not the variables.

    Returns:
        How many frames were cleared.
    """
    cleared = 0
    for error in walk_chain(exc):
        traceback = error.__traceback__
        while traceback is not None:
            try:
                traceback.tb_frame.clear()
                cleared += 1
            except RuntimeError:  # It is still running.
                pass
            traceback = traceback.tb_next
    return cleared
