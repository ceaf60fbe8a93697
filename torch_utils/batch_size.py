"""find_batch_size: call a function with the largest batch size that fits into memory."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from torch_utils._runtime import DEBUG, called_function, log, notify
from torch_utils.memory import empty_caches, trim_host
from torch_utils.oom import Handled

__all__ = ["find_batch_size"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def find_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    restore_after: int | None = None,
    *,
    factor: float = 0.5,
) -> Callable[P, R]: ...
@overload
def find_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    restore_after: int | None = None,
    *,
    factor: float = 0.5,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    restore_after: int | None = None,
    *,
    factor: float = 0.5,
) -> Any:
    """Call a function with a batch size, and with smaller ones while memory runs out.

    The function takes the batch size as its first argument; callers leave it out. Later calls
    start with the size that was found. Before each new try, the frames of the failed call's
    exception are cleared, and then the device caches are emptied. An older exception that is being
    handled during the call does not count as a failure. The arguments and the behaviour are those
    of accelerate's ``find_executable_batch_size``. Threads may call the function concurrently and
    share the size. Coroutine functions are awaited; emptying the caches blocks the event loop.

    ::

        @find_batch_size(starting_batch_size=512)
        def embed(batch_size, texts): ...

        embed(texts)

    Args:
        function: The function to decorate.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next smaller size, instead of ``factor``.
        restore_after: After this many successful calls in a row, try the next larger size again,
            up to the starting size. None keeps a size that was found.
        factor: The next size is the last one times ``factor``, rounded down. With the default of
            0.5, four tries fail between 128 and 8, and the result is at least half of what would
            fit. With 0.9, as in newer versions of accelerate, 22 tries fail and the result is
            closer.

    Returns:
        The decorated function, without the batch size among its arguments.

    Raises:
        RuntimeError: "No executable batch size found": even a batch size of 1 does not fit. The
            cause is the exception of the last try.
        TypeError: ``function`` is not callable, or is a generator function, which cannot be
            repeated after it has yielded. The decorated function raises it if a call passes the
            batch size.
        ValueError: ``factor`` is not between 0 and 1, ``starting_batch_size`` is not a whole number
            of at least 0, or ``reduce_batch_size_fn`` returned a size that is not smaller.
    """
    if type(starting_batch_size) is not int or starting_batch_size < 0:
        raise ValueError(
            f"starting_batch_size must be an int of at least 0, got {starting_batch_size!r}"
        )
    if not 0 < factor < 1:
        raise ValueError(f"factor must be between 0 and 1, got {factor}")
    if function is None:
        return functools.partial(
            find_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            restore_after=restore_after,
            factor=factor,
        )
    if not callable(function):
        raise TypeError(
            f"find_batch_size must decorate a function, got {function!r}; pass the first batch "
            "size as starting_batch_size="
        )
    size = _Size(starting_batch_size, reduce_batch_size_fn, restore_after, factor)
    called = called_function(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(
            f"find_batch_size cannot repeat {function!r}, a generator function; decorate a "
            "function that returns its whole result"
        )
    if inspect.iscoroutinefunction(called):

        @functools.wraps(function)
        async def awaiting_wrapper(*args: Any, **kwargs: Any) -> Any:
            _check_arguments(function, args, kwargs)
            attempts = size.attempts()
            while True:
                with next(attempts) as batch_size:
                    return await function(batch_size, *args, **kwargs)

        return awaiting_wrapper

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(function, args, kwargs)
        attempts = size.attempts()
        while True:
            with next(attempts) as batch_size:
                return function(batch_size, *args, **kwargs)

    return wrapper


def _check_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise a TypeError if a call passes the batch size as well."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A builtin without a signature.
        return
    first = next(iter(signature.parameters), None)
    if first is None or _binds(signature, (0, *args), kwargs):
        return
    if first in kwargs or _binds(signature, args, kwargs):
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name}() gets its batch size from find_batch_size; call it without the argument "
            f"{first!r}"
        )


def _binds(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@dataclass
class _Attempt:
    """One call with one batch size; as a context manager it suppresses out-of-memory errors."""

    batch_size: int
    size: _Size
    handled: Handled
    error: BaseException | None = None

    def __enter__(self) -> int:
        return self.batch_size

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            self.size.succeeded(self.batch_size)
        # An error that was raised while such an error was handled does not repeat the call.
        elif isinstance(error, Exception) and self.handled.is_out_of_memory(error, contexts=False):
            self.error = error
        return self.error is not None


@dataclass
class _Size:
    """The batch size that calls share."""

    start: int
    reduce_fn: Callable[[], int] | None
    restore_after: int | None
    factor: float
    successes: int = 0

    def __post_init__(self) -> None:
        self._current = self.start
        self._lock = threading.Lock()

    def attempts(self) -> Iterator[_Attempt]:
        """Yield an attempt for each size until one succeeds or the size reaches 0."""
        handled = Handled(sys.exc_info()[1])
        batch_size, error = self._current, None
        while batch_size > 0:
            attempt = _Attempt(batch_size, self, handled)
            yield attempt
            # Inside the `with` block the interpreter itself would keep the frames of the failed
            # call alive, and the tensors in them.
            error = attempt.error
            assert error is not None
            handled.clear_frames(error)
            empty_caches()
            trim_host()
            failed, batch_size = batch_size, self._reduce(batch_size)
            log(DEBUG, "out of memory with batch size %d, next: %d", failed, batch_size)
            if batch_size > 0:
                notify("retry")
        raise RuntimeError("No executable batch size found, reached zero.") from error

    def _reduce(self, failed: int) -> int:
        with self._lock:
            self.successes = 0
            smaller = int(failed * self.factor) if self.reduce_fn is None else self.reduce_fn()
            if smaller >= failed:
                raise ValueError(
                    f"reduce_batch_size_fn must return less than {failed}, the size that failed, "
                    f"got {smaller}"
                )
            # If not even 1 fits, the next call starts with 1: memory may be free then.
            self._current = min(self._current, max(smaller, min(1, self.start)))
            return smaller

    def succeeded(self, size: int) -> None:
        with self._lock:
            self.successes += 1
            if self.restore_after is not None and self.successes >= self.restore_after:
                self.successes = 0
                self._current = min(max(size + 1, int(size / self.factor)), self.start)
