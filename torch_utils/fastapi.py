"""What a web application holds is given back when its server stops: a lifespan with a scope.

::

    from torch_utils.fastapi import lifespan

    @lifespan
    async def models(app, scope):
        model = scope.manage(ModelHost(load_model))
        yield {"model": model}  # becomes request.state.model

    app = FastAPI(lifespan=models)

Servers end by a signal that never reaches atexit (uvicorn raises SIGTERM again when it has shut
down), so this is where their models are closed. Imports neither FastAPI nor Starlette: any ASGI
framework that takes a function of the application and gives an asynchronous context manager its
place will do. The server's loop is asyncio's, or one with its interface, such as uvloop.
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
"""The share of the deadline in which hosts wait for leases; the rest is for closing the others."""
_SHOWN_FRAMES = 4
T = TypeVar("T")
State = Mapping[str, Any] | None
A = TypeVar("A")  # the application
P = ParamSpec("P")  # the scope, or nothing
S = TypeVar("S", bound=State)
Lifespan = Callable[Concatenate[A, P], AsyncIterator[S] | AbstractAsyncContextManager[S]]
Enter = Callable[[A], AbstractAsyncContextManager[S]]


class Decorator(Protocol):
    """What `lifespan` returns without a function."""

    def __call__(self, function: Lifespan[A, P, S], /) -> Enter[A, S]:
        """Give a lifespan a scope."""


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
    """Give a lifespan a scope, whose resources are closed when the server stops.

    They are closed in reverse order, in a thread of their own, so that the event loop goes on
    meanwhile; coroutine functions among the callbacks are awaited in the loop. What has not
    ended when the deadline is over is named in the log, with the line that it is at, and left
    behind with all that was to come after it: the server stops all the same. Hosts and pools that
    the scope manages wait for leases for four fifths of that time; one that is lent even then is
    named with where it was lent, and the others are closed. Errors out of closing are logged, and
    never replace one of the application. If starting fails, what was managed by then is closed.
    One that is cancelled closes first, and passes that on.

    Args:
        function: ``async def lifespan(app, scope)``, which yields once, or a function that
            returns an asynchronous context manager; one that takes the application only, as a
            lifespan that exists already does, is entered and left the same way. What it yields,
            a mapping or None, is what the application gets for its state. The scope is a
            `SafePyTorchCleanup`.
        deadline_s: How long closing may take, in seconds.
        around: A lifespan of the application that exists already: entered before, left after
            everything of the scope is closed. What both yield is merged.

    Returns:
        A function of the application, for ``FastAPI(lifespan=...)`` and its like. Each call is
        a lifespan of its own. Without a function, a decorator.

    Raises:
        TypeError: A function is none, or takes neither one argument nor two; or the deadline is
            no number.
        ValueError: The deadline is not positive, or not finite.
    """
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
        raise TypeError(f"deadline_s must be a number of seconds, not {deadline_s!r}")
    if not 0 < deadline_s < math.inf:
        raise ValueError(f"deadline_s must be positive and finite, not {deadline_s!r}")
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
        raise TypeError(f"a lifespan yields a mapping for the state, or nothing, not {state!r}")
    return state


def _opener(function: Callable[..., Any]) -> Callable[[Any, Any], AbstractAsyncContextManager[Any]]:
    """Return how to enter a lifespan, however it was written."""
    if not callable(function):
        raise TypeError(f"a lifespan is a function of the application, not {function!r}")
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
    """A scope that a thread ends: what must be awaited is, in the event loop it was opened in."""

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
                # The end of the program closes what is still open, or there was no thread to.
                coroutine.close()
                getattr(result, "close", bool)()
                raise RuntimeError("its event loop has stopped: nothing can be awaited any more")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

        return functools.wraps(function)(call)


async def _await(awaitable: Any) -> Any:
    return await awaitable


class _closing:  # noqa: N801  (used like the context managers of contextlib)
    """Open a scope; at the end, have a thread close it, and wait for that until the deadline."""

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
        closed.set_running_or_notify_cancel()  # A wait that is cancelled does not cancel it.
        for lender in self._scope.lenders:
            lender.close_by(time.monotonic() + self._deadline_s * _FOR_LEASES)

        def close() -> None:
            try:
                self._stack.__exit__(exc_type, exc, trace)
            except BaseException as error:
                # SystemExit out of a closer, say: it cannot end the program from here, and the
                # scope has closed the others, and has logged it, before it let this through.
                report = self._scope.report
                if report is None or not any(error is failure for failure in report.errors):
                    log(ERROR, "closing the application's resources: %r", error, exc_info=error)
            finally:
                closed.set_result(None)

        thread = threading.Thread(target=close, name="torch_utils.lifespan", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No thread can be started: out of them, or the program is ending.
            close()
            return
        cancelled = None
        if isinstance(exc, GeneratorExit):  # Nothing can be awaited in what is being closed.
            wait([closed], self._deadline_s)
        else:
            cancelled = await self._wait(closed)
        if not closed.done():
            self._leave_behind(thread)
        if cancelled is not None:
            raise cancelled

    async def _wait(self, closed: Future[None]) -> asyncio.CancelledError | None:
        """Wait until the deadline, cancelled or not; return the cancellation."""
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
        """Say what hangs, and have the end of the program not wait for it once more."""
        ident = thread.ident or 0
        block = self._scope._block
        left = [] if block is None else [block.running, *reversed(block.items)]
        names = [item.name for item in left if item is not None]
        REGISTRY.leave_behind(ident)
        frame = sys._current_frames().get(ident)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])
        log(
            ERROR,
            "closing the application's resources has not ended after %g s: %s is still being "
            "closed, and is left behind%s. Its thread is at:\n%s",
            self._deadline_s,
            names[0] if names else "the last of them",
            f"; not begun: {', '.join(names[1:])}" if names[1:] else "",
            stack,
        )
