"""Out of memory: recognise the errors, clear their frames, and find a batch size that fits."""

from __future__ import annotations

import errno
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from traceback import walk_tb
from types import FrameType, FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from torch_utils._memory import empty_caches, trim_host
from torch_utils._runtime import DEBUG, loaded_torch, log, notify, reference_counts

P = ParamSpec("P")
R = TypeVar("R")

_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
# Messages of allocators and libraries that raise a plain RuntimeError.
_RUNTIME_MESSAGES = (
    "out of memory",
    "DefaultCPUAllocator: ",
    "_ALLOC_FAILED",  # of cuBLAS, cuDNN, cuSOLVER, cuSPARSE and cuFFT
    "_ALLOCATION_FAILED",
    "std::bad_alloc",
    # torch's message for ENOMEM if it cannot map shared memory or a file.
    f"Cannot allocate memory ({errno.ENOMEM})",
)


def _walk_chain(error: BaseException, *, contexts: bool = True) -> Iterator[BaseException]:
    """Yield an exception and its causes, contexts and group members, each once."""
    seen: set[int] = set()
    pending: list[Any] = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseException) and id(current) not in seen:
            seen.add(id(current))
            yield current
            pending.append(current.__cause__)
            with suppress(Exception):  # Only a group has members; a property may raise anything.
                pending += getattr(current, "exceptions", ())
            if contexts:
                pending.append(current.__context__)


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an exception means that a device or the host ran out of memory.

    Args:
        exc: The exception. Its causes, contexts and group members are examined as well.

    Returns:
        True if one of them is an out-of-memory error. Imports nothing.
    """
    return any(map(_says_out_of_memory, _walk_chain(exc)))


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
    # Not str(error), which a class may override.
    text = " ".join(argument for argument in error.args if isinstance(argument, str))
    return any(message in text for message in _RUNTIME_MESSAGES)


def clear_exception_frames(exc: BaseException) -> int:
    """Clear the local variables of all frames that an exception keeps alive.

    The traceback still prints as before. Frames that are still running keep their variables, as do
    those of generators and coroutines that handled the exception and continue. Safe from any
    thread.

    Args:
        exc: The exception. Its causes, contexts and group members are cleared as well.

    Returns:
        The number of frames that were cleared.
    """
    tracebacks = [error.__traceback__ for error in _walk_chain(exc)]
    return sum(clear_frame(frame) for traceback in tracebacks for frame, _ in walk_tb(traceback))


def clear_frame(frame: FrameType) -> bool:
    """Clear a frame unless it is running, or a live generator or coroutine may own it.

    ``frame.clear()`` closes a suspended generator before Python 3.13, and raises from then on.
    """
    if frame.f_code.co_flags & _SUSPENDABLE and sys.version_info < (3, 13):
        # A frame refers to its code for the garbage collector once no generator owns it.
        if not any(referent is frame.f_code for referent in gc.get_referents(frame)):
            return False
    try:
        frame.clear()
    except RuntimeError:  # It is running or suspended.
        return False
    # The frame keeps its function. If nothing else does, its closure goes too.
    functions = [one for one in gc.get_referents(frame) if type(one) is FunctionType]
    if reference_counts(functions) == [1]:
        cells = list(functions[0].__closure__ or ())
        for cell, count in zip(cells, reference_counts(cells), strict=True):
            if count == 1:
                with suppress(ValueError):  # It is empty.
                    del cell.cell_contents
    if sys.version_info < (3, 13):
        _ = frame.f_locals  # Empties the dictionary that an earlier look at it has filled.
    return True


# Batch sizes


@overload
def find_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = 0.5,
) -> Callable[P, R]: ...
@overload
def find_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = 0.5,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = 0.5,
) -> Any:
    """Call a function with a batch size, and with smaller ones while memory runs out.

    The function takes the batch size as its first argument; callers leave it out. Later calls
    start with the size that was found. Before each new try, the frames of the failed call's
    exception are cleared, garbage is collected, and then the device caches are emptied. An older
    exception that is being handled during the call does not count as a failure. The arguments and
    the behaviour are those of accelerate's ``find_executable_batch_size``. Threads may call the
    function concurrently and share the size. Coroutine functions are awaited; emptying the caches
    blocks the event loop.

    ::

        @find_batch_size(starting_batch_size=512)
        def embed(batch_size, texts): ...

        embed(texts)

    Args:
        function: The function to decorate.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next smaller size, instead of ``factor``.
        factor: The next size is the last one times ``factor``, rounded down. With the default of
            0.5, four tries fail between 128 and 8, and the result is at least half of what would
            fit. With 0.9, as in newer versions of accelerate, 22 tries fail and the result is
            closer.

    Returns:
        The decorated function, without the batch size among its arguments.

    Raises:
        RuntimeError: "No executable batch size found": even a batch size of 1 does not fit. The
            cause is the exception of the last try.
        TypeError: ``function`` is not callable, is a method, whose first argument is ``self``, or
            is a generator function, which cannot be repeated after it has yielded. The decorated
            function raises it if its call passes a batch size.
        ValueError: ``factor`` is not between 0 and 1, ``starting_batch_size`` is not a whole number
            of at least 0, or ``reduce_batch_size_fn`` returned a size that is not smaller.
    """
    if type(starting_batch_size) is not int or starting_batch_size < 0:
        raise ValueError(f"starting_batch_size must be an int >= 0, got {starting_batch_size!r}")
    if not 0 < factor < 1:
        raise ValueError(f"factor must be between 0 and 1, got {factor}")
    if function is None:
        options = (starting_batch_size, reduce_batch_size_fn)
        return lambda function: find_batch_size(function, *options, factor=factor)
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if is_generator or not callable(function):
        raise TypeError(
            f"find_batch_size must decorate a function that returns its whole result, got "
            f"{function!r}; pass the first batch size as starting_batch_size="
        )
    arguments = function.__code__.co_varnames if inspect.isfunction(function) else ()
    if arguments[:1] == ("self",):
        raise TypeError(
            f"find_batch_size would pass the batch size as self of {function.__qualname__}(); "
            "decorate a function inside the method, or find_batch_size(self.method)"
        )
    size = _Size(function, starting_batch_size, factor, reduce_batch_size_fn)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaiting_wrapper(*args: Any, **kwargs: Any) -> Any:
            for attempt in size.attempts(args, kwargs):
                with attempt:
                    return await function(attempt.batch_size, *args, **kwargs)
            return None  # Unreachable: the last attempt raises.

        return awaiting_wrapper

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for attempt in size.attempts(args, kwargs):
            with attempt:
                return function(attempt.batch_size, *args, **kwargs)
        return None  # Unreachable: the last attempt raises.

    return wrapper


_NOT_SUPPORTED = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"


@dataclass
class _Attempt:
    """One call with one batch size; as a context manager it suppresses out-of-memory errors."""

    batch_size: int
    error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception) and (
            # An error that was raised while such an error was handled does not repeat the call.
            any(map(_says_out_of_memory, _walk_chain(error, contexts=False)))
            # cuDNN says so too if its workspace does not fit. accelerate repeats such calls.
            or (isinstance(error, RuntimeError) and _NOT_SUPPORTED in str(error))
        ):
            self.error = error
        return self.error is not None


@dataclass
class _Size:
    """The batch size that calls share."""

    function: Callable[..., Any]
    current: int
    factor: float
    reduce_fn: Callable[[], int] | None

    def attempts(self, args: Any, kwargs: Any) -> Iterator[_Attempt]:
        """Yield an attempt for each size until one succeeds or the size reaches 0.

        Raises:
            TypeError: The function does not take these arguments beside a batch size.
        """
        with suppress(ValueError):  # A builtin has no signature.
            signature = inspect.signature(self.function)
            try:
                signature.bind(self.current, *args, **kwargs)
            except TypeError as mismatch:
                raise TypeError(
                    f"{mismatch}: find_batch_size passes the batch size as the first argument of "
                    f"{self.function!r}; call it with the other arguments only"
                ) from None
        batch_size, error = self.current, None
        while batch_size > 0:
            attempt = _Attempt(batch_size)
            yield attempt
            # Inside the `with` block the interpreter itself would keep the frames of the failed
            # call alive, and the tensors in them.
            error = attempt.error
            assert error is not None
            clear_exception_frames(error)
            gc.collect()  # What the call created may be in cycles.
            empty_caches()
            trim_host()
            smaller = int(batch_size * self.factor) if self.reduce_fn is None else self.reduce_fn()
            log(DEBUG, "out of memory with batch size %d, next: %d", batch_size, smaller)
            if smaller >= batch_size:
                raise ValueError(
                    f"reduce_batch_size_fn must return less than {batch_size}, got {smaller}"
                )
            batch_size = smaller
            # If not even 1 fits, the next call starts with 1: memory may be free then.
            self.current = min(self.current, max(batch_size, 1))
            if batch_size > 0:
                notify("retry")
        raise RuntimeError("No executable batch size found, reached zero.") from error
