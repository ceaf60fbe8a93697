"""find_batch_size: run a function with the largest batch that fits into memory."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from torch_utils._coroutines import called_function
from torch_utils._events import tell
from torch_utils._runtime import DEBUG, log
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
    """Call a function with a batch size, and with a smaller one whenever memory runs out.

    The function takes the batch size as its first argument; callers leave it out. The size
    that was found is kept for later calls. Before each new try everything of the failed one is
    let go: its exception's frames are cleared, outside of the ``except`` block, and only then
    are the caches emptied. Only what the call itself raised counts as a failed try, not an
    older exception that was being handled when it was made. Behaves as accelerate's
    ``find_executable_batch_size``, whose arguments it takes. Safe from several threads; they
    share what was found. Coroutine functions are awaited, and their emptied caches block the
    event loop for as long as that takes.

    ::

        @find_batch_size(starting_batch_size=512)
        def embed(batch_size, texts): ...

        embed(texts)

    Args:
        function: What to call.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next smaller size, instead of ``factor``.
        restore_after: After so many successful calls in a row try the next greater size again
            (twice the size, with the default factor), up to the starting size. By default a
            size that was found stays.
        factor: What the last size is multiplied by for the next one, rounded down. A half by
            default, since every try that fails costs as much as one that does not: from 128 to
            8 four of them fail, and the size found is at least half of what would fit. 0.9, as
            in newer versions of accelerate, comes closer, after 22 failures.

    Raises:
        RuntimeError: "No executable batch size found": not even 1 fits. Its cause is the error
            of the last try.
        TypeError: A caller passed the batch size, or what is decorated is not a function, or is a
            generator function, whose tries cannot be repeated once it has yielded.
        ValueError: ``factor`` is not between 0 and 1, or ``starting_batch_size`` is
            not a whole number of at least 0.
    """
    if type(starting_batch_size) is not int or starting_batch_size < 0:
        raise ValueError(
            f"starting_batch_size must be an int of 0 or more, not {starting_batch_size!r}"
        )
    if not 0 < factor < 1:
        raise ValueError(f"factor must be between 0 and 1, not {factor}")
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
            f"find_batch_size decorates a function, not {function!r}; the size to begin with is "
            "starting_batch_size="
        )
    size = _Size(starting_batch_size, reduce_batch_size_fn, restore_after, factor)
    called = called_function(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(
            f"find_batch_size cannot repeat {_name(function)}, a generator function: what it has "
            "yielded cannot be taken back; decorate a function that works on one whole input"
        )
    wrapper: Callable[..., Any]
    if inspect.iscoroutinefunction(called):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            tries = _Tries(size, function, args, kwargs)
            while True:
                batch_size = tries.next_size()
                try:
                    result = await function(batch_size, *args, **kwargs)
                except Exception as failure:  # As below; a cancellation is not an Exception.
                    if not tries.failed(failure):
                        raise
                else:
                    size.succeeded(batch_size)
                    return result
                tries.clean_up()

    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tries = _Tries(size, function, args, kwargs)
            while True:
                batch_size = tries.next_size()
                try:
                    result = function(batch_size, *args, **kwargs)
                except Exception as failure:
                    # Of any kind: which of them mean a lack of memory is for the tries to say.
                    if not tries.failed(failure):
                        raise
                else:
                    size.succeeded(batch_size)
                    return result
                # Here, and not above: within the handler the interpreter itself keeps the failed
                # try's frames, and the tensors in them, alive.
                tries.clean_up()

    return wrapper


class _Tries:
    """The tries of one call."""

    def __init__(
        self,
        size: _Size,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        _refuse_batch_size(function, args, kwargs)
        self._size = size
        self._next = size.current
        self._error: Exception | None = None
        self._handled = Handled(sys.exc_info()[1])

    def next_size(self) -> int:
        """Return the size to try next."""
        error, self._error = self._error, None
        if self._next <= 0:
            raise RuntimeError("No executable batch size found, reached zero.") from error
        return self._next

    def failed(self, error: Exception) -> bool:
        """Say whether an error means that a smaller size may fit."""
        if not self._handled.is_out_of_memory(error):
            return False
        self._error = error
        return True

    def clean_up(self) -> None:
        """Let go of all that the failed try has left, and choose the next size."""
        assert self._error is not None
        self._handled.clear_frames(self._error)
        empty_caches()
        trim_host()
        failed, self._next = self._next, self._size.reduce(self._next)
        log(DEBUG, "out of memory with batch size %d, next: %d", failed, self._next)
        if self._next > 0:
            tell("retry")


class _Size:
    """The batch size that calls share."""

    def __init__(
        self,
        start: int,
        reduce_fn: Callable[[], int] | None,
        restore_after: int | None,
        factor: float,
    ) -> None:
        self.current = start
        self._start = start
        self._reduce_fn = reduce_fn
        self._restore_after = restore_after
        self._factor = factor
        self._successes = 0
        self._lock = threading.Lock()

    def reduce(self, failed: int) -> int:
        with self._lock:
            self._successes = 0
            smaller = int(failed * self._factor) if self._reduce_fn is None else self._reduce_fn()
            # When not even 1 fits, the next call begins with 1 again: memory may be free then.
            self.current = min(self.current, max(smaller, min(1, self._start)))
            return smaller

    def succeeded(self, size: int) -> None:
        with self._lock:
            self._successes += 1
            if self._restore_after is not None and self._successes >= self._restore_after:
                self._successes = 0
                self.current = min(max(size + 1, int(size / self._factor)), self._start)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _refuse_batch_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # A builtin that does not tell.
        return
    if not parameters:
        raise TypeError(f"`{_name(function)}` must take the batch size as its first argument")
    names = [parameter.name for parameter in parameters]
    is_variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if names[0] in kwargs or (len(names) <= len(args) and not is_variadic):
        others = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
        others.pop(names[0], None)
        shown = ", ".join(f"{name}={value}" for name, value in others.items())
        raise TypeError(
            f"Batch size was passed into `{_name(function)}` as the first argument when called. "
            f"Remove this as the decorator already does so: `{_name(function)}({shown})`"
        )
