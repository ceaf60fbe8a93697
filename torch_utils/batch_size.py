"""find_batch_size: run a function with the largest batch that fits into memory."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch_utils._runtime import DEBUG, log
from torch_utils.memory import empty_caches, trim_host
from torch_utils.oom import clear_exception_frames, is_out_of_memory

__all__ = ["find_batch_size"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def find_batch_size(function: F) -> Callable[..., Any]: ...
@overload
def find_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    restore_after: int | None = None,
) -> Callable[[F], Callable[..., Any]]: ...
def find_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    restore_after: int | None = None,
) -> Any:
    """Call a function with a batch size, and with half of it whenever memory runs out.

    The function takes the batch size as its first argument; callers leave it out. The size
    that was found is kept for later calls. Before each new try everything of the failed one is
    let go: its exception's frames are cleared, outside of the ``except`` block, and only then
    are the caches emptied. Behaves as accelerate's ``find_executable_batch_size``, whose
    arguments it takes. Safe from several threads; they share what was found.

    ::

        @find_batch_size(starting_batch_size=512)
        def embed(batch_size, texts): ...

        embed(texts)

    Args:
        function: What to call.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next smaller size; by default half of the last one.
        restore_after: After so many successful calls in a row try twice the size again, up to
            the starting size. By default a size that was found stays.

    Raises:
        RuntimeError: "No executable batch size found": not even 1 fits. Its cause is the error
            of the last try.
        TypeError: A caller passed the batch size.
    """
    if function is None:
        return functools.partial(
            find_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            restore_after=restore_after,
        )
    size = _Size(starting_batch_size, reduce_batch_size_fn, restore_after)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _refuse_batch_size(function, args)
        batch_size, error = size.current, None
        while True:
            if batch_size <= 0:
                raise RuntimeError("No executable batch size found, reached zero.") from error
            error = None
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as failure:
                # Of any kind: which of them mean a lack of memory is for is_out_of_memory.
                if not is_out_of_memory(failure):
                    raise
                error = failure
            else:
                size.succeeded(batch_size)
                return result
            # Here, and not above: within the handler the interpreter itself keeps the failed
            # try's frames, and the tensors in them, alive.
            clear_exception_frames(error)
            empty_caches()
            trim_host()
            smaller = size.reduce(batch_size)
            log(DEBUG, "out of memory with batch size %d, next: %d", batch_size, smaller)
            batch_size = smaller

    return wrapper


class _Size:
    """The batch size that calls share."""

    def __init__(
        self, start: int, reduce_fn: Callable[[], int] | None, restore_after: int | None
    ) -> None:
        self.current = start
        self._start = start
        self._reduce_fn = reduce_fn
        self._restore_after = restore_after
        self._successes = 0
        self._lock = threading.Lock()

    def reduce(self, failed: int) -> int:
        with self._lock:
            self._successes = 0
            smaller = self._reduce_fn() if self._reduce_fn is not None else failed // 2
            # When not even 1 fits, the next call begins with 1 again: memory may be free then.
            self.current = max(smaller, min(1, self._start))
            return smaller

    def succeeded(self, size: int) -> None:
        with self._lock:
            self._successes += 1
            if self._restore_after is not None and self._successes >= self._restore_after:
                self._successes = 0
                self.current = min(size * 2, self._start)


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(parameters) > len(args):
        return
    shown = ", ".join(f"{p.name}={v}" for p, v in zip(parameters[1:], args[1:], strict=False))
    name = getattr(function, "__name__", repr(function))
    raise TypeError(
        f"Batch size was passed into `{name}` as the first argument when called. "
        f"Remove this as the decorator already does so: `{name}({shown})`"
    )
