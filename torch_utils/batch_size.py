"""find_batch_size: run a function with the largest batch that fits into memory."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

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
        TypeError: A caller passed the batch size, or the function does not take one. Or, when
            decorating: what should be a function is none, or is a generator function, whose
            tries cannot be repeated once it has yielded. Or ``reduce_batch_size_fn`` returned None.
        ValueError: ``factor`` is not between 0 and 1, or ``starting_batch_size`` or
            ``restore_after`` no whole number.
    """
    if function is not None and not callable(function):
        raise TypeError(
            f"find_batch_size decorates a function, not {function!r}; the size to begin with is "
            "starting_batch_size="
        )
    if type(starting_batch_size) is not int or starting_batch_size < 0:
        raise ValueError(f"starting_batch_size must be a whole number, not {starting_batch_size!r}")
    if type(factor) not in (int, float) or not 0 < factor < 1:
        raise ValueError(f"factor must be between 0 and 1, not {factor}")
    if reduce_batch_size_fn is not None and not callable(reduce_batch_size_fn):
        raise TypeError(f"reduce_batch_size_fn must be a function, not {reduce_batch_size_fn!r}")
    if restore_after is not None and (type(restore_after) is not int or restore_after < 1):
        raise ValueError(f"restore_after must be a whole number of calls, not {restore_after!r}")
    if function is None:
        return functools.partial(
            find_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            restore_after=restore_after,
            factor=factor,
        )
    size = _Size(starting_batch_size, reduce_batch_size_fn, restore_after, factor)
    # An instance is called by its class's method: that one is the coroutine function, if any.
    called = function if inspect.isroutine(function) else _called(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(
            f"find_batch_size cannot repeat {_name(function)}, a generator function: what it has "
            "yielded cannot be taken back; decorate a function that works on one whole input"
        )
    return (
        _awaiting(function, size)
        if inspect.iscoroutinefunction(called)
        else _calling(function, size)
    )


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, (type, functools.partial)):
        return function
    method: Callable[..., Any] = type(function).__call__
    return method


def _calling(function: Callable[..., Any], size: _Size) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _refuse_batch_size(function, args, kwargs)
        tries = _Tries(size)
        while True:
            batch_size = tries.next_size()
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as failure:
                # Of any kind: which of them mean a lack of memory is for the tries to say.
                if not tries.failed(failure):
                    raise
            else:
                _refuse_coroutine(function, result)
                size.succeeded(batch_size)
                return result
            # Here, and not above: within the handler the interpreter itself keeps the failed
            # try's frames, and the tensors in them, alive.
            tries.clean_up()

    return wrapper


def _awaiting(function: Callable[..., Any], size: _Size) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        _refuse_batch_size(function, args, kwargs)
        tries = _Tries(size)
        while True:
            batch_size = tries.next_size()
            try:
                result = await function(batch_size, *args, **kwargs)
            except Exception as failure:  # As above; a cancellation is no Exception.
                if not tries.failed(failure):
                    raise
            else:
                size.succeeded(batch_size)
                return result
            tries.clean_up()

    return wrapper


class _Tries:
    """The tries of one call."""

    def __init__(self, size: _Size) -> None:
        self._size = size
        self._next = size.current
        self._error: Exception | None = None
        self._handled = Handled()

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
            smaller = (
                self._reduce_fn() if self._reduce_fn is not None else int(failed * self._factor)
            )
            if smaller is None:
                raise TypeError("reduce_batch_size_fn returned None; it has to return the size")
            # When not even 1 fits, the next call begins with 1 again: memory may be free then.
            self.current = max(smaller, min(1, self._start))
            return smaller

    def succeeded(self, size: int) -> None:
        with self._lock:
            self._successes += 1
            if self._restore_after is not None and self._successes >= self._restore_after:
                self._successes = 0
                greater = max(size + 1, int(size / self._factor))
                self.current = min(greater, self._start)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _refuse_coroutine(function: Callable[..., Any], result: Any) -> None:
    if isinstance(result, CoroutineType):
        result.close()  # Or it would warn that it was never awaited.
        raise TypeError(
            f"{_name(function)} returned a coroutine, which runs only when nobody can try again; "
            "decorate the `async def` function itself with find_batch_size"
        )


def _refuse_batch_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # A builtin that does not tell.
        return
    if not parameters:
        raise TypeError(f"`{_name(function)}` must take the batch size as its first argument")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    first = parameters[0]
    is_named = first.kind is first.POSITIONAL_OR_KEYWORD and first.name in kwargs
    if len(parameters) > len(args) and not is_named:
        return
    others = {p.name: value for p, value in zip(parameters[1:], args[1:], strict=False)}
    if is_named:
        others = {name: value for name, value in kwargs.items() if name != first.name}
    shown = ", ".join(f"{name}={value}" for name, value in others.items())
    raise TypeError(
        f"Batch size was passed into `{_name(function)}` as the first argument when called. "
        f"Remove this as the decorator already does so: `{_name(function)}({shown})`"
    )
