"""Leases, which lend a hosted model for a block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch_utils._runtime import early_bound, is_finalizing, is_shutting_down
from torch_utils.errors import ResourceClosedError, TorchUtilsError
from torch_utils.hosting.process import ModelProcess, Proxy
from torch_utils.hosting.tenant import Tenant

if TYPE_CHECKING:
    from torch_utils.hosting.host import ModelHost

__all__ = ["AsyncLease", "Holder", "Lease", "check_seconds", "run_in_thread"]

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Holder:
    """A thread or coroutine that holds a lease or waits for one.

    Attributes:
        where: The line of the program that requested the lease, and its thread.
        thread: The thread; None for a coroutine, whose thread also runs others.
        since: The time of the request, by `time.monotonic`.
    """

    where: str
    thread: int | None
    since: float


class _Lease(Generic[M]):
    """Base of the leases of threads and of coroutines."""

    def __init__(self, host: ModelHost[M], timeout_s: float | None, frame: FrameType) -> None:
        check_seconds("timeout_s", timeout_s)
        self._host = host  # Keeps the host alive and open.
        self._timeout_s = timeout_s
        self._is_entered = False
        self._holder: Holder | None = None  # None once the lease has ended
        self._process: ModelProcess | None = None
        self._calls: list[None] = []  # calls that are running in the process
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _begin(self, thread: int | None) -> Holder:
        if self._is_entered:
            raise TorchUtilsError("a lease can be entered once; get another one from the host")
        self._is_entered = True
        by = f", by thread {threading.current_thread().name}" if thread else ", by a coroutine"
        self._holder = Holder(self._where + by, thread, time.monotonic())
        return self._holder

    def _model(self, tenant: Tenant) -> M:
        model = tenant.model
        if isinstance(model, ModelProcess):
            self._process = model
            what = f"the proxy of {self._host.name} (process {model.pid})"
            model = Proxy(self._ask, what)
        return cast(M, model)

    def _ask(self, kind: str, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        process = self._process
        if process is None:
            raise ResourceClosedError(
                f"the lease of {self._host.name} has ended; use the model inside its block"
            )
        self._calls.append(None)
        try:
            if kind == "get":
                return process.get(name)
            return process.call(name, *arguments, **keywords)
        finally:
            self._calls.pop()

    def _end(self) -> None:
        holder, process = self._holder, self._process
        self._process = None
        if holder is None or is_finalizing():  # A thread that is gone may hold the lock.
            return
        if process is not None and self._calls and self._host.status().leases == 1:
            process.kill()  # Its caller was cancelled, and the call may never end.
        self._host.end_lease(holder)
        self._holder = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's protocols look up such names.
            raise AttributeError(name)
        how = "async with" if isinstance(self, AsyncLease) else "with"
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; get the model by "
            f"`{how} ... as model:`"
        )

    @early_bound
    def __del__(self) -> None:
        holder = getattr(self, "_holder", None)
        if holder is not None and not is_shutting_down():
            self._host.drop_lease(holder)


class Lease(_Lease[M]):
    """The lease of a model for a ``with`` block; see `ModelHost.lease`."""

    def __enter__(self) -> M:
        holder = self._begin(threading.get_ident())
        try:
            return self._model(self._host.acquire(holder, self._timeout_s)[0])
        except BaseException:  # The caller gets no lease.
            self._end()
            self._host.wake_expiry()
            raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self._end()
        if not is_finalizing():
            self._host.unload_if_due()


class AsyncLease(_Lease[M]):
    """The lease of a model for an ``async with`` block; see `ModelHost.alease`."""

    async def __aenter__(self) -> M:
        holder = self._begin(None)
        try:
            return self._model(await self._host.aacquire(holder, self._timeout_s))
        except BaseException:  # The caller gets no lease.
            self._end()
            self._host.wake_expiry()
            raise

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self._end()
        if self._host.is_due():
            await run_in_thread(self._host.unload_if_due)


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a function in a new thread; the thread continues if the coroutine is cancelled.

    The loop's executor may be busy, and the end of the loop would wait for it.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # The coroutine raises it.
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="torch_utils-host", daemon=True).start()
    except RuntimeError:  # No thread can be started: the interpreter is ending.
        run()
    return await asyncio.wrap_future(future)


def check_seconds(name: str, value: object) -> None:
    """Check that an argument is a number of seconds or None.

    Raises:
        TypeError: It is not a number.
        ValueError: It is NaN or longer than the longest possible wait.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r}")
    if not value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{name} must be at most {threading.TIMEOUT_MAX:.0f} seconds and not NaN, got {value!r}"
        )
