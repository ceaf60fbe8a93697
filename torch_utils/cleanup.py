"""SafePyTorchCleanup: a scope at whose end models are released, whatever happened in it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, TypeVar

from torch_utils._releasing.plan import plan
from torch_utils._releasing.work import Collect, check_collect
from torch_utils._scope import Callback, Managed, Policy, Use, caller_key, needs_argument
from torch_utils.errors import TorchUtilsError
from torch_utils.report import CleanupReport

__all__ = ["CleanupReport", "SafePyTorchCleanup"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class SafePyTorchCleanup:
    """Release models, tensors and other resources at the end of a block.

    ::

        with SafePyTorchCleanup() as scope:
            model = scope.manage(SentenceTransformer("all-MiniLM-L6-v2"))
            serve(model)
        print(scope.report)

    Also as ``async with``, and as a decorator of functions, coroutine functions, generators
    and asynchronous generators. One scope may be used many times, nested in itself, and by
    several threads or tasks at once: each use has its own resources.

    What is managed is released last-in first-out, each step on its own. An exception in the
    block always wins; what fails in the cleanup is noted on it, logged, and listed in the
    report. After an out-of-memory error the frames of the whole exception chain are cleared
    too, so that the tensors in them go. A scope that is open when the program ends is closed
    then, while all modules are intact; a forked child never closes its parent's.

    Args:
        *resources: What to release at the end: anything that `release` takes.
        collect: See `release`.
        trim_host: See `release`.
        thorough: See `release`.
        restore_flags: Put back torch's global switches as they were at the beginning: cudnn,
            matmul precision, determinism, grad mode, default dtype and device, threads.
        strict: Raise `CleanupError`, an ExceptionGroup, if the block succeeded and steps of
            the cleanup failed.

    Raises:
        TypeError: A resource is of a kind that `release` does not know.
        ValueError: ``collect`` is none of its values.
    """

    def __init__(
        self,
        *resources: Any,
        collect: Collect = "auto",
        trim_host: bool = True,
        thorough: bool = False,
        restore_flags: bool = False,
        strict: bool = False,
    ) -> None:
        check_collect(collect)
        plan(resources)
        self._resources = resources
        self._policy = Policy(collect, trim_host, thorough, restore_flags, strict)
        self._open: list[Use] = []
        self._in_this_thread = threading.local()
        self._last_report: CleanupReport | None = None

    @property
    def report(self) -> CleanupReport | None:
        """What the last cleanup did: this thread's last, if it has had one. None before."""
        mine: CleanupReport | None = getattr(self._in_this_thread, "report", None)
        return mine or self._last_report

    def manage(self, obj: T, close: Callable[..., Any] | None = None) -> T:
        """Have an object released at the end of the block; returns the object.

        Args:
            obj: Anything that `release` takes, or anything at all if ``close`` is given.
            close: How to release it instead, called with the object if it needs an argument.

        Raises:
            TypeError: `release` would not know how, and there is no ``close``.
            TorchUtilsError: The scope is not open.
        """
        use = self._current()
        if close is None:
            plan([obj])
            use.items.append(Managed(obj))
        else:
            use.items.append(Callback(close, (obj,) if needs_argument(close) else ()))
        return obj

    def callback(self, fn: F, *args: Any, **kwargs: Any) -> F:
        """Have a function called at the end of the block; returns the function.

        A coroutine function is awaited, in an ``async with`` block.

        Raises:
            TorchUtilsError: The scope is not open.
        """
        self._current().items.append(Callback(fn, args, kwargs))
        return fn

    def __enter__(self) -> SafePyTorchCleanup:
        self._begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._open:  # Empty where exit has closed it already.
            self._current().__exit__(exc_type, exc, traceback)

    async def __aenter__(self) -> SafePyTorchCleanup:
        self._begin()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._open:
            await self._current().__aexit__(exc_type, exc, traceback)

    def __call__(self, function: F) -> F:
        """Decorate a function of any kind: each call runs in a use of its own."""
        wrapper: Any
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                async with self._begin():
                    generator = function(*args, **kwargs)
                    try:
                        value = await anext(generator)
                        while True:
                            try:
                                sent = yield value
                            except Exception as error:  # thrown in by whoever iterates
                                value = await generator.athrow(error)
                            else:
                                value = await generator.asend(sent)
                    except StopAsyncIteration:
                        return
                    finally:
                        await generator.aclose()

        elif inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                async with self._begin():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with self._begin():
                    return (yield from function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self._begin():
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]

    def _begin(self) -> Use:
        use = Use(type(self).__name__, self._policy, self._resources, self._ended)
        self._open.append(use)
        return use

    def _ended(self, use: Use) -> None:
        self._open.remove(use)
        self._last_report = self._in_this_thread.report = use.report

    def _current(self) -> Use:
        """Return the caller's newest open use; for a helper thread, the newest of all."""
        caller = caller_key()
        open_uses = list(self._open)
        for use in reversed(open_uses):
            if use.caller == caller:
                return use
        if open_uses:
            return open_uses[-1]
        raise TorchUtilsError(
            f"this {type(self).__name__} is not open; use it inside its with block"
        )
