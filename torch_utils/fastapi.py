"""A lifespan with a scope, which closes an application's resources when its server stops.

::

    from torch_utils.fastapi import lifespan

    @lifespan
    async def models(app, scope):
        model = scope.manage(ModelHost(load_model))
        yield {"model": model}  # becomes request.state.model

    app = FastAPI(lifespan=models)

Servers often end by a signal, without exit callbacks: uvicorn raises SIGTERM again after its
shutdown. This module imports neither FastAPI nor Starlette. It works with any ASGI framework whose
lifespan is a function that takes the application and returns an asynchronous context manager. The
event loop must be asyncio's or a compatible one, such as uvloop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from torch_utils._registry import REGISTRY
from torch_utils._runtime import ERROR, log
from torch_utils.cleanup import SafePyTorchCleanup
from torch_utils.hosting.lender import ModelLender

__all__ = ["lifespan"]

_FOR_LEASES = 0.8
"""The share of the deadline for which hosts wait for leases. The rest is for closing."""
_SHOWN_FRAMES = 4
T = TypeVar("T")
State = Mapping[str, Any] | None
A = TypeVar("A")  # the application
P = ParamSpec("P")  # the scope, or nothing
S = TypeVar("S", bound=State)
Lifespan = Callable[Concatenate[A, P], AsyncIterator[S] | AbstractAsyncContextManager[S]]
Enter = Callable[[A], AbstractAsyncContextManager[S]]


class Decorator(Protocol):
    """The type of `lifespan` without a function."""

    def __call__(self, function: Lifespan[A, P, S], /) -> Enter[A, S]:
        """Return a lifespan whose resources are closed when the server stops."""


@overload
def lifespan(
    function: Lifespan[A, P, S],
    *,
    deadline_s: float = ...,
    around: Callable[..., Any] | None = ...,
) -> Enter[A, S]: ...


@overload
def lifespan(
    function: None = None, *, deadline_s: float = ..., around: Callable[..., Any] | None = ...
) -> Decorator: ...


def lifespan(
    function: Callable[..., Any] | None = None,
    *,
    deadline_s: float = 10.0,
    around: Callable[..., Any] | None = None,
) -> Any:
    """Decorate a lifespan with a scope that closes its resources when the server stops.

    A separate thread closes the resources, newest first, while the event loop continues. Coroutine
    functions among the callbacks are awaited in the loop. Exceptions of the cleanup are logged and
    never replace an exception of the application. If the startup fails or is cancelled, the
    resources managed so far are closed first.

    At the deadline the server stops. The log names the resource that is still being closed, with
    its current line, and those that were not closed. Managed hosts and pools wait for leases for
    four fifths of the deadline; the log then names each open lease, and the other resources are
    closed.

    Args:
        function: ``async def lifespan(app, scope)`` that yields once, or a function that returns
            an asynchronous context manager. It may also take only the application. It yields the
            state of the application, a mapping or None. The scope is a `SafePyTorchCleanup`.
        deadline_s: Seconds that the cleanup may take.
        around: An existing lifespan of the application. It is entered first and left after the
            scope is closed. The two states are merged.

    Returns:
        A function that takes the application, for ``FastAPI(lifespan=...)`` and similar
        parameters. Each call creates a new lifespan. A decorator if ``function`` is None.

    Raises:
        TypeError: A lifespan is not a function of one or two arguments, or ``deadline_s`` is not a
            number.
        ValueError: ``deadline_s`` is not positive and finite.
    """
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
        raise TypeError(f"deadline_s must be a number of seconds, got {deadline_s!r}")
    if not 0 < deadline_s < math.inf:
        raise ValueError(f"deadline_s must be positive and finite, got {deadline_s!r}")
    outer = None if around is None else _opener(around)

    def decorate(function: Callable[..., Any]) -> Enter[Any, State]:
        enter = _opener(function)

        @functools.wraps(function)
        @asynccontextmanager
        async def entered(app: Any) -> AsyncGenerator[State, None]:
            async with AsyncExitStack() as stack:
                outer_state = None if outer is None else await _enter(stack, outer(app, None))
                scope = await stack.enter_async_context(_closing(deadline_s))
                state = await _enter(stack, enter(app, scope))
                yield state if outer_state is None else {**outer_state, **(state or {})}

        return entered

    return decorate if function is None else decorate(function)


async def _enter(stack: AsyncExitStack, manager: AbstractAsyncContextManager[State]) -> State:
    state = await stack.enter_async_context(manager)
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"a lifespan must yield a mapping or None, got {state!r}")
    return state


def _opener(function: Callable[..., Any]) -> Callable[[Any, Any], AbstractAsyncContextManager[Any]]:
    """Return a function of the application and the scope that creates a lifespan."""
    if not callable(function):
        raise TypeError(f"a lifespan must be a function of the application, got {function!r}")
    manager = asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"{function.__qualname__} must be an `async def` that yields once")
    for arguments in (2, 1):
        try:
            inspect.signature(function).bind(*range(arguments))
        except TypeError:
            continue
        return lambda app, scope: manager(*(app, scope)[:arguments])
    raise TypeError(
        f"{getattr(function, '__qualname__', function)!s} must take the application and the "
        "scope: async def lifespan(app, scope)"
    )


class LifespanScope(SafePyTorchCleanup):
    """A scope that a thread closes. The event loop that opened it awaits its coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.lenders: list[ModelLender] = []

    def manage(self, obj: T, close: Callable[..., Any] | None = None) -> T:
        if isinstance(obj, ModelLender):
            self.lenders.append(obj)
        return super().manage(obj, None if close is None else self._in_loop(close))

    def callback(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:  # type: ignore[override]
        super().callback(self._in_loop(fn), *args, **kwargs)
        return fn

    def _in_loop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not inspect.isawaitable(result):
                return result
            coroutine = _await(result)
            if not self._loop.is_running() or threading.get_ident() == self._thread:
                # Closed at exit, or in the loop's own thread for want of another one.
                coroutine.close()
                getattr(result, "close", bool)()
                raise RuntimeError(
                    "the application's event loop has stopped and cannot await "
                    f"{getattr(function, '__qualname__', function)}"
                )
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

        return functools.wraps(function)(call)


async def _await(awaitable: Any) -> Any:
    return await awaitable


class _closing:  # noqa: N801  (used like the context managers of contextlib)
    """Open a scope; at the end, a thread closes it, with a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._stack = ExitStack()

    async def __aenter__(self) -> SafePyTorchCleanup:
        self._scope = self._stack.enter_context(LifespanScope())
        return self._scope

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()  # Cancelling a wait must not cancel it.
        for lender in self._scope.lenders:
            lender.close_by(time.monotonic() + self._deadline_s * _FOR_LEASES)

        def close() -> None:
            try:
                self._stack.__exit__(exc_type, exc, trace)
            except BaseException as error:
                # A SystemExit cannot end the program from this thread. The scope has closed the
                # other resources already, and logged exceptions that are in its report.
                report = self._scope.report
                if report is None or not any(error is failure for failure in report.errors):
                    log(
                        ERROR,
                        "closing the application's resources failed: %r",
                        error,
                        exc_info=error,
                    )
            finally:
                closed.set_result(None)

        thread = threading.Thread(target=close, name="torch_utils.lifespan", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No thread can be started: too many, or the program is ending.
            close()
            return
        cancelled = None
        if isinstance(exc, GeneratorExit):  # A coroutine that is being closed cannot await.
            wait([closed], self._deadline_s)
        else:
            cancelled = await self._wait(closed)
        if not closed.done():
            self._leave_behind(thread)
        if cancelled is not None:
            raise cancelled

    async def _wait(self, closed: Future[None]) -> asyncio.CancelledError | None:
        """Wait until the deadline, even if cancelled; return the cancellation."""
        ends, cancelled = time.monotonic() + self._deadline_s, None
        waiting = asyncio.wrap_future(closed)
        while not waiting.done() and (left := ends - time.monotonic()) > 0:
            try:
                await asyncio.wait([waiting], timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        waiting.cancel()
        return cancelled

    def _leave_behind(self, thread: threading.Thread) -> None:
        """Log what hangs, and exclude it from the exit callback."""
        ident = thread.ident or 0
        block = self._scope._block
        left = [] if block is None else [block.running, *reversed(block.items)]
        names = [item.name for item in left if item is not None]
        REGISTRY.skip_at_exit(ident)
        frame = sys._current_frames().get(ident)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])
        log(
            ERROR,
            "the application's resources were not closed within %g s: %s is still being closed "
            "and is abandoned%s. Its thread is at:\n%s",
            self._deadline_s,
            names[0] if names else "the last one",
            f"; not closed: {', '.join(names[1:])}" if names[1:] else "",
            stack,
        )
