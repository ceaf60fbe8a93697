"""Lease: a hosted model for the length of a block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from os import getpid
from types import FrameType
from typing import Any, Generic, TypeVar

from torch_utils._runtime import early_bound, is_shutting_down
from torch_utils.errors import NoRoomError, ResourceClosedError, TorchUtilsError
from torch_utils.hosting.attempt import Attempt
from torch_utils.hosting.core import Core
from torch_utils.hosting.process import ModelProcess
from torch_utils.hosting.proxy import Proxy
from torch_utils.hosting.tenancy import Holder
from torch_utils.hosting.tenants import Tenant
from torch_utils.hosting.waiting import LoopWaiter, ThreadWaiter, check_seconds, off_the_loop

__all__ = ["AsyncLease", "Lease"]

M = TypeVar("M")
W = TypeVar("W", ThreadWaiter, LoopWaiter)
_NUMBERS = iter(range(1, 1 << 62))


class _Lease(Generic[M]):
    """What leases of threads and of coroutines have in common.

    One that is dropped without its end is ended by its destructor; a fork's copy is not the
    parent's lease.
    """

    _use = ""

    def __init__(self, host: Any, core: Core, timeout_s: float | None, frame: FrameType) -> None:
        check_seconds("timeout_s", timeout_s)
        self._host = host  # Not to be collected, and closed, while this is open.
        self._core = core
        self._timeout_s = timeout_s
        self._number = 0  # while it is open, or about to be
        self._outcome: Tenant | Exception | None = None  # what `_lent` returns or raises
        self._process: ModelProcess | None = None
        self._calls: list[None] = []  # that are under way
        self._no_room = ""  # why, where it waited for some
        code = frame.f_code
        self._where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"

    def _begin(self, thread: int | None) -> Holder:
        if self._number:
            raise TorchUtilsError("a lease is entered once; ask the host for another")
        self._number = next(_NUMBERS)
        by = f", by thread {threading.current_thread().name}" if thread else ", by a coroutine"
        return Holder(self._where + by, thread, time.monotonic())

    def _left(self, deadline: float | None, attempt: Attempt) -> float | None:
        self._no_room = attempt.no_room or self._no_room
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            if self._no_room:
                raise NoRoomError(self._no_room)
            state = self._core.tenancy.state
            raise TimeoutError(f"{self._core.name} is still {state} after {self._timeout_s} s")
        return left

    def _waits(
        self, holder: Holder, waiter_of: Callable[[], W], load: Callable[..., Tenant | None]
    ) -> Iterator[tuple[W, float | None]]:
        """Yield what to wait for, and how many seconds, until the outcome is known.

        Args:
            holder: Who asks for it.
            waiter_of: Makes what waits.
            load: Loads it, or begins to; returns what it has lent, if it has.
        """
        core = self._core
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        mine: Attempt | None = None  # that this began, and that may be over before it is asked for
        core.want(self._number)
        while self._outcome is None:
            waiter = waiter_of()
            answer = core.ask(self._number, holder, waiter.wake)
            if isinstance(answer, Tenant):
                self._outcome = answer
            elif mine is not None and mine.error is not None:
                self._outcome = mine.error
            elif not answer.is_begun:
                mine = answer
                mine.deadline = deadline
                try:
                    self._outcome = load(mine, self._number, holder)
                except Exception as error:
                    # Raised by `_lent`: a StopIteration would come out of here as another error.
                    self._outcome = error
            else:
                yield waiter, self._left(deadline, answer)
                if not answer.gave_up:
                    self._outcome = answer.error

    def _lent(self) -> M:
        if not isinstance(self._outcome, Tenant):
            assert self._outcome is not None
            raise self._outcome
        tenant, self._outcome = self._outcome, None
        self._core.no_longer_want(self._number)
        model = tenant.model
        if isinstance(model, ModelProcess):
            self._process = model
            what = f"a lease of {self._core.name}, which runs in process {model.pid}"
            model = Proxy(self._ask, model.methods, what)
        lent: M = model
        return lent

    def _ask(self, kind: str, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        process = self._process
        if process is None:
            raise ResourceClosedError(
                f"the lease of {self._core.name} has ended; use the model inside of its block"
            )
        self._calls.append(None)
        try:
            if kind == "get":
                return process.get(name)
            return process.call(name, *arguments, **keywords)
        finally:
            self._calls.pop()

    def _end(self) -> None:
        number, process = self._number, self._process
        self._process = self._outcome = None
        if number <= 0 or self._core.pid != getpid():
            return
        if process is not None and self._calls and len(self._core.tenancy.leases) == 1:
            # Whoever waited for that call has gone, and it might go on for ever.
            process.kill()
        self._core.end_lease(number)
        self._number = -1

    def _give_up(self) -> None:
        self._end()
        self._core.expire_soon()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Of protocols, which are asked for, and of what is half built.
            raise AttributeError(name)
        raise AttributeError(
            f"this is a {type(self).__name__}, and no model: {self._use} (it has no {name!r})"
        )

    @early_bound
    def __del__(self) -> None:
        # Nothing has been lent, or it was given back. At exit the host itself sees to it.
        if getattr(self, "_number", 0) <= 0 or is_shutting_down():
            return
        if self._core.pid == getpid():
            self._core.drop_lease(self._number)


class Lease(_Lease[M]):
    """A model for the length of a ``with`` block; `ModelHost.lease` makes it."""

    _use = "use what `with ... as model:` gives"

    def __enter__(self) -> M:
        holder = self._begin(threading.get_ident())
        try:
            for waiter, left_s in self._waits(holder, ThreadWaiter, self._core.load):
                waiter.wait(left_s)
            return self._lent()
        except BaseException:
            self._give_up()
            raise

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self._end()
        self._core.expire_now()


class AsyncLease(_Lease[M]):
    """A model for the length of an ``async with`` block; `ModelHost.alease` makes it."""

    _use = "use what `async with ... as model:` gives"

    async def __aenter__(self) -> M:
        holder = self._begin(None)
        try:
            for waiter, left_s in self._waits(holder, LoopWaiter, self._core.load_in_background):
                await waiter.wait(left_s)
            return self._lent()
        except BaseException:
            self._give_up()
            raise

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self._end()
        if self._core.is_due():
            await off_the_loop(self._core.expire_now)
