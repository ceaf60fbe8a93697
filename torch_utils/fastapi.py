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
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, overload

from torch_utils._cleanup import SafePyTorchCleanup
from torch_utils._registry import REGISTRY
from torch_utils._runtime import ERROR, log
from torch_utils.hosting.arguments import check_seconds
from torch_utils.hosting.lease import ModelLender
from torch_utils.hosting.threads import in_thread

__all__ = ["lifespan"]

_FOR_LEASES = 0.8
"""The share of the deadline for which hosts wait for leases. The rest is for closing."""
_SHOWN_FRAMES = 4
_PAUSE_S = 0.005
T = TypeVar("T")
A = TypeVar("A")  # the application
S = TypeVar("S", bound=Mapping[str, Any] | None)
Lifespan = Callable[[A, SafePyTorchCleanup], AsyncIterator[S]]
Enter = Callable[[A], AbstractAsyncContextManager[S]]
Around = Callable[[Any], Any] | None


@overload
def lifespan(
    function: Lifespan[A, S], *, deadline_s: float = ..., around: Around = ...
) -> Enter[A, S]: ...


@overload
def lifespan(
    function: None = None, *, deadline_s: float = ..., around: Around = ...
) -> Callable[[Lifespan[A, S]], Enter[A, S]]: ...


def lifespan(
    function: Callable[..., Any] | None = None, *, deadline_s: float = 10.0, around: Around = None
) -> Any:
    """Decorate a lifespan with a scope that closes its resources when the server stops.

    A separate thread closes the resources, newest first, while the event loop continues. Coroutine
    functions among the callbacks are awaited in the loop. Exceptions of the cleanup are logged and
    never replace an exception of the application. If the startup fails or is cancelled, the
    resources managed so far are closed first.

    At the deadline the server stops, and the log has the stack of the thread that is still closing
    a resource; older resources stay open. Managed hosts and pools wait for leases for four fifths
    of the deadline; the log then names each open lease, and the other resources are closed.

    Args:
        function: ``async def lifespan(app, scope)`` that yields once: the state of the
            application, a mapping or None. The scope is a `SafePyTorchCleanup`.
        deadline_s: Seconds that the cleanup may take.
        around: An existing lifespan of the application. It is entered first and left after the
            scope is closed. The two states are merged.

    Returns:
        A function that takes the application, for ``FastAPI(lifespan=...)`` and similar
        parameters. Each call creates a new lifespan. A decorator if ``function`` is None.

    Raises:
        TypeError: The function is not an ``async def`` that yields, or ``deadline_s`` is not a
            number.
        ValueError: ``deadline_s`` is negative or not finite.
    """
    check_seconds("deadline_s", deadline_s)
    outer = asynccontextmanager(around) if inspect.isasyncgenfunction(around) else around

    def decorate(function: Callable[..., Any]) -> Enter[Any, Any]:
        if not inspect.isasyncgenfunction(function):
            raise TypeError(
                "a lifespan must be an `async def` that takes the application and the scope and "
                f"yields once, got {function!r}; pass an existing lifespan as around="
            )
        enter = asynccontextmanager(function)

        @functools.wraps(function)
        @asynccontextmanager
        async def entered(app: Any) -> AsyncGenerator[Any, None]:
            async with AsyncExitStack() as stack:
                outer_state = await stack.enter_async_context(outer(app)) if outer else None
                scope = stack.push_async_exit(LifespanScope(deadline_s)).__enter__()
                state = await stack.enter_async_context(enter(app, scope))
                yield {**outer_state, **(state or {})} if outer_state else state

        return entered

    return decorate if function is None else decorate(function)


class LifespanScope(SafePyTorchCleanup):
    """A scope that a thread closes. The event loop that opened it awaits its coroutines.

    Args:
        deadline_s: Seconds that the cleanup may take.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._lenders: list[ModelLender] = []

    def manage(self, obj: T, close: Callable[..., Any] | None = None) -> T:
        super().manage(obj, None if close is None else self._in_loop(close))
        if isinstance(obj, ModelLender) and close is None:
            self._lenders.append(obj)
        return obj

    def callback(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:  # type: ignore[override]
        super().callback(self._in_loop(fn), *args, **kwargs)
        return fn

    def _in_loop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
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

        return call

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        ends = time.monotonic() + self._deadline_s
        for lender in self._lenders:
            lender._closes_by = ends - self._deadline_s * (1 - _FOR_LEASES)
        threads: list[int] = []

        def close() -> None:
            threads.append(threading.get_ident())
            try:
                self.__exit__(exc_type, exc, trace)
            except BaseException as error:
                # A SystemExit cannot end the program from this thread. The scope has closed the
                # other resources already, and logged exceptions that are in its report.
                if self.report is None or not any(error is one for one in self.report.errors):
                    what = "closing the application's resources failed: %r"
                    log(ERROR, what, error, exc_info=error)

        closed, cancelled = in_thread(close), None
        if isinstance(exc, GeneratorExit):  # A coroutine that is being closed cannot await.
            wait([closed], self._deadline_s)
        else:
            cancelled = await _wait_until(ends, closed)
        if not closed.done():
            self._abandon(threads)
        if cancelled is not None:
            raise cancelled

    def _abandon(self, threads: list[int]) -> None:
        """Log where the thread hangs, and exclude what it closes from the exit callback."""
        stack = ""
        for ident in threads:
            REGISTRY.skip_at_exit(ident)
            frame = sys._current_frames().get(ident)
            stack += "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:]) if frame else ""
        log(
            ERROR,
            "closing %s exceeded %g s and was abandoned; stack of its thread:\n%s",
            "the application's resources",
            self._deadline_s,
            stack,
        )


async def _await(awaitable: Any) -> Any:
    return await awaitable


async def _wait_until(when: float, closed: Future[None]) -> asyncio.CancelledError | None:
    """Wait until a time by `time.monotonic`, even if cancelled; return the cancellation."""
    waiting, cancelled = asyncio.wrap_future(closed), None
    while not waiting.done() and (left := when - time.monotonic()) > 0:
        try:
            await asyncio.wait([waiting], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
            # A cancelled scope of anyio cancels this in each turn of the loop.
            wait([closed], min(left, _PAUSE_S))
    waiting.cancel()
    return cancelled
