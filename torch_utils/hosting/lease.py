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

from torch_utils._registry import REGISTRY, Entry
from torch_utils._resource import Resource
from torch_utils._runtime import early_bound, is_finalizing, is_shutting_down
from torch_utils.errors import ResourceClosedError, TorchUtilsError
from torch_utils.hosting.arguments import check_seconds
from torch_utils.hosting.process import ModelProcess, Proxy
from torch_utils.hosting.tenancy import Holder
from torch_utils.hosting.tenant import Tenant, ThreadTenant
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
        while frame.f_globals.get("__name__", "").startswith("torch_utils.hosting."):
            frame = frame.f_back
        self._host = host  # A ModelHost, which stays alive and open.
        self._timeout_s = timeout_s
        self._holder: Holder | None = None  # None before the lease and after its end
        self._has_ended = False
        self._process: ModelProcess | None = None
        self._calls: set[object] = set()  # calls that wait for the process or run in it
        self._is_in_generator = bool(frame.f_code.co_flags & CO_GENERATOR)
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _begin(self, thread: int | None) -> Holder:
        if self._holder is not None or self._has_ended:
            raise TorchUtilsError("a lease can be entered once; get another one from the host")
        by = f", by thread {threading.current_thread().name}" if thread else ", by a coroutine"
        # Another thread may go on with a generator, and end the lease.
        own = None if self._is_in_generator else thread
        self._holder = Holder(self._where + by, own, time.monotonic())
        return self._holder

    def _model(self, tenant: Tenant) -> M:
        if isinstance(tenant, ThreadTenant):
            return cast(M, tenant.model)
        self._process = tenant
        what = f"the proxy of {self._host.name} (process {tenant.pid})"
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
        holder = self._holder
        if holder is None or is_finalizing():  # A thread that is gone may hold the lock.
            return
        self._has_ended = True
        if self._calls:
            holder.thread = None  # It is now the lease of the call.
        else:
            self._host.tenancy.end_lease(holder)
            self._holder = None

    def finish(self) -> None:
        """End the lease, and unload the model if it is due."""
        self.end()
        if not is_finalizing():
            self._host.unload_if_due()

    def _abort(self) -> None:
        self.end()
        self._host.expiry.dropped.put(None)  # Checks the model; this thread need not unload it.

    @early_bound
    def __del__(self) -> None:
        holder = getattr(self, "_holder", None)
        if holder is not None and not is_shutting_down():
            self._host.expiry.dropped.put(holder)


class Lease(_Lease[M]):
    """The lease of a model for a ``with`` block; see `ModelHost.lease`."""

    def __enter__(self) -> M:
        holder = self._begin(threading.get_ident())
        try:
            return self._model(self._host.acquire(holder, self._timeout_s)[0])
        except BaseException:  # The caller gets no lease.
            self._abort()
            raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.finish()


class AsyncLease(_Lease[M]):
    """The lease of a model for an ``async with`` block; see `ModelHost.alease`."""

    async def __aenter__(self) -> M:
        holder = self._begin(None)
        try:
            return self._model(await self._host.aacquire(holder, self._timeout_s))
        except BaseException:  # The caller gets no lease.
            self._abort()
            raise

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self.end()
        if self._host.tenancy.is_due():
            await run_in_thread(self._host.unload_if_due)

    async def call(self, function: Callable[[M], T]) -> T:
        """Enter the lease, and call a function of the model in a thread, which ends the lease."""
        if iscoroutinefunction(function):
            raise TypeError(f"call a plain function, or use an async with block, got {function!r}")
        model = await self.__aenter__()

        def call() -> T:
            if self._holder is not None:
                self._holder.thread = threading.get_ident()  # It cannot wait for its own end.
            try:
                return function(model)
            finally:
                self.finish()

        try:
            return await run_in_thread(call)
        except asyncio.CancelledError:
            self._has_ended = True  # Refuses further calls of a process.
            raise


class ModelLender(Resource):
    """Base of `ModelHost` and `ModelPool`: `close` waits for leases until a deadline."""

    closes_by: float | None = None
    """Until when `close` waits for leases, by `time.monotonic`; None for `CLOSE_S` from then on."""

    def register_in_child(self) -> None:
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
            deadline_s: Seconds to wait for the leases of all models together; `CLOSE_S` by
                default.

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
            self.closes_by = time.monotonic() + deadline_s
        self.register_in_child()
        return super().close()

    async def aclose(self, deadline_s: float | None = None) -> bool:
        """Close in a thread, while the event loop continues. See `close`."""
        return await run_in_thread(partial(self.close, deadline_s))

    async def __aexit__(self, *details: Any) -> None:
        await run_in_thread(partial(self.__exit__, *details))
