"""Leases, which lend a hosted model for a block, and the base of what lends them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from inspect import CO_GENERATOR, iscoroutinefunction
from typing import Any, Generic, TypeVar, cast

from torch_utils._registry import REGISTRY, Entry, ensure_ran
from torch_utils._resource import Resource
from torch_utils._runtime import early_bound, is_finalizing, is_shutting_down
from torch_utils.errors import ResourceClosedError, TorchUtilsError
from torch_utils.hosting.arguments import check_seconds
from torch_utils.hosting.loaded_model import LoadedModel, ThreadModel
from torch_utils.hosting.process import ModelProcess, Proxy
from torch_utils.hosting.state_machine import Request
from torch_utils.hosting.threads import run_in_thread

__all__ = ["AsyncLease", "Lease", "ModelLender"]

CLOSE_S = 10.0
"""How long closing waits for leases, in seconds."""

M = TypeVar("M")
T = TypeVar("T")


class _Lease(Generic[M]):
    """Base of the leases of threads and of coroutines."""

    def __init__(self, host: Any, timeout_s: float | None) -> None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        frame: Any = sys._getframe(1)
        while str(frame.f_globals.get("__name__")).startswith("torch_utils.hosting."):
            if frame.f_back is None:  # Called by a thread that runs nothing else.
                break
            frame = frame.f_back
        self._host = host  # A ModelHost, which stays alive and open.
        self._timeout_s = timeout_s
        self._request: Request | None = None  # None before the lease and after its end
        self._has_ended = False
        self._process: ModelProcess | None = None
        self._calls: set[object] = set()  # calls that wait for the process or run in it
        self._is_in_generator = bool(frame.f_code.co_flags & CO_GENERATOR)
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _begin(self, by: str, task: int | None = None) -> Request:
        if self._request is not None or self._has_ended:
            raise TorchUtilsError("a lease can be entered once; get another one from the host")
        # Another thread may go on with a generator, and end the lease.
        thread = None if self._is_in_generator else threading.get_ident()
        self._request = Request(f"{self._where}, by {by}", thread, task)
        return self._request

    def _model(self) -> M:
        request = self._request
        loaded: LoadedModel | None = None if request is None else request.loaded
        assert request is not None and loaded is not None  # It was granted.
        if isinstance(loaded, ThreadModel):
            return cast(M, request.model)
        self._process = loaded
        what = f"the proxy of {self._host.name} (process {loaded.pid})"
        return cast(M, Proxy(self._ask, what))

    def _ask(self, *request: Any) -> Any:
        process = self._process
        assert process is not None  # There is a proxy.
        call = object()
        try:
            self._calls.add(call)
            return process.ask(*request, check=self.ensure_open, wait_s=self._timeout_s)
        finally:
            self._calls.discard(call)
            if self._has_ended and not self._calls:  # This was an abandoned call.
                self.finish()

    def ensure_open(self) -> None:
        """Raise an error if the lease has ended."""
        if self._has_ended:
            raise ResourceClosedError(
                f"the lease of {self._host.name} has ended; use the model inside its block"
            )

    def end(self) -> None:
        """End the lease: now, or when the call returns that still runs in the process."""
        request = self._request
        if request is None or is_finalizing():  # A thread that is gone may hold the lock.
            return
        self._has_ended = True
        if self._calls:
            request.thread = None  # It is now the lease of the call.
        else:
            if self._host._machine.end_lease(request):
                self._host._expiry.look()
            self._request = None

    def finish(self) -> None:
        """End the lease, and do what is due then, such as an unload."""
        self.end()
        if not is_finalizing():
            self._host._do_what_is_due()

    def _abort(self) -> None:
        self.end()
        self._host._expiry.look()  # This thread need not unload the model.

    @early_bound
    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and not is_shutting_down():
            self._host._expiry.end_later(request)


class Lease(_Lease[M]):
    """The lease of a model for a ``with`` block; see `ModelHost.lease`."""

    def __enter__(self) -> M:
        request = self._begin(f"thread {threading.current_thread().name}")
        try:
            self._host._acquire(request, self._timeout_s)
            return self._model()
        except BaseException:  # The caller gets no lease.
            self._abort()
            raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.finish()


class AsyncLease(_Lease[M]):
    """The lease of a model for an ``async with`` block; see `ModelHost.alease`."""

    async def __aenter__(self) -> M:
        request = self._begin("a coroutine", id(asyncio.current_task()))
        try:
            await self._host._aacquire(request, self._timeout_s)
            return self._model()
        except BaseException:  # The caller gets no lease.
            self._abort()
            raise

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self.end()
        if self._host._machine.has_work():
            await run_in_thread(self._host._do_what_is_due)

    async def call(self, function: Callable[[M], T]) -> T:
        """Enter the lease, and call a function of the model in a thread, which ends the lease."""
        if iscoroutinefunction(function):
            raise TypeError(f"call a plain function, or use an async with block, got {function!r}")
        model = await self.__aenter__()
        if self._request is not None:  # It goes on without this task.
            self._request.thread = self._request.task = None

        def call() -> T:
            if self._request is not None:  # It cannot wait for its own end.
                self._request.thread, self._request.task = threading.get_ident(), None
            try:
                result = function(model)
                ensure_ran(result, "await or iterate it in a block of a lease")
                return result
            finally:
                self.finish()

        try:
            return await run_in_thread(call)
        except asyncio.CancelledError:
            self._has_ended = True  # Refuses further calls of a process.
            raise


class ModelLender(Resource):
    """Base of `ModelHost` and `ModelPool`: `close` waits for leases until a deadline."""

    # Until when `close` waits for leases, by `time.monotonic`; None for `CLOSE_S` from then on.
    _closes_by: float | None = None

    def _register_in_child(self) -> None:
        """In a forked child: register an entry of this process, so that it closes the model.

        This must not happen in the fork itself, where multiprocessing drops the child's finalizers.
        """
        entry = REGISTRY.get(id(self))
        if entry is not None and entry.pid != os.getpid():
            release = type(self)._release
            REGISTRY.add(Entry(id(self), entry.name, weakref.ref(self), release))

    def close(self, deadline_s: float | None = None) -> bool:
        """Stop lending, wait for open leases, and unload.

        A pool closes all its hosts, newest first, even if one of them fails.

        Args:
            deadline_s: Seconds to wait for the leases of all models together; 10 by default.

        Returns:
            True if this call closed it.

        Raises:
            ModelInUseError: Leases are still open at the deadline. The message names each of them.
                The end of its last lease then unloads a model.
            TypeError: ``deadline_s`` is not a number. Nothing was closed.
            ValueError: ``deadline_s`` is negative or not finite. Nothing was closed.
        """
        if deadline_s is not None:
            check_seconds("deadline_s", deadline_s)
            self._closes_by = time.monotonic() + deadline_s
        self._register_in_child()
        return super().close()

    async def aclose(self, deadline_s: float | None = None) -> bool:
        """Close in a thread, while the event loop continues. See `close`."""
        return await run_in_thread(partial(self.close, deadline_s))

    async def __aexit__(self, *details: Any) -> None:
        await run_in_thread(partial(self.__exit__, *details))
