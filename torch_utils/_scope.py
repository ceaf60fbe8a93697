"""One use of a cleanup scope: what it manages, and how that ends."""

from __future__ import annotations

import inspect
import sys
from _thread import get_ident
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch_utils._flags import read_flags, restore_flags
from torch_utils._registry import REGISTRY, Entry
from torch_utils._releasing.plan import plan
from torch_utils._releasing.work import Collect, Release
from torch_utils._runtime import is_shutting_down
from torch_utils.errors import CleanupError
from torch_utils.oom import clear_exception_frames, is_out_of_memory
from torch_utils.report import CleanupReport
from torch_utils.resource import add_note


@dataclass(frozen=True)
class Policy:
    """How a scope cleans up; see `SafePyTorchCleanup`."""

    collect: Collect
    trim_host: bool
    thorough: bool
    restore_flags: bool
    strict: bool


@dataclass
class Managed:
    """An object to release."""

    thing: Any

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.thing).__name__

    def run(self, work: Release) -> None:
        """Release it."""
        work.run(plan([self.thing], again=True))


@dataclass
class Callback:
    """A function to call."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def run(self, work: Release) -> Any:
        """Call it; what it returns may have to be awaited."""
        return self.function(*self.args, **self.kwargs)


class Use:
    """From one entry into a scope to its end; a context manager of both kinds."""

    def __init__(
        self, name: str, policy: Policy, resources: tuple[Any, ...], on_end: Callable[[Use], None]
    ) -> None:
        self.caller = caller_key()
        self.items: list[Managed | Callback] = [Managed(resource) for resource in resources]
        self.report: CleanupReport | None = None
        self._policy = policy
        self._on_end = on_end
        self._flags = read_flags() if policy.restore_flags else {}
        self._errors: list[BaseException] = []
        # The registry keeps the use alive, not the other way round only: a scope that is open
        # at exit is closed then, whoever has forgotten it.
        self._entry = Entry(id(self), name, lambda: self, Use._close_at_exit)
        REGISTRY.add(self._entry)

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entry.claim():
            return
        try:
            self._run(exc)
        finally:
            self._entry.finish()
        self._raise_errors(exc)

    async def __aenter__(self) -> Use:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entry.claim():
            return
        try:
            await self._run_async(exc)
        finally:
            self._entry.finish()
        self._raise_errors(exc)

    def _close_at_exit(self) -> None:
        """Run the cleanup from the exit registration, where nobody is left to raise to."""
        self._run(None)

    def _run(self, exc: BaseException | None) -> None:
        steps = self._steps(exc)
        try:
            awaitable = next(steps)
            while True:
                if inspect.iscoroutine(awaitable):
                    awaitable.close()  # Or it would warn that it was never awaited.
                awaitable = steps.throw(
                    TypeError("what this returned must be awaited: use `async with`")
                )
        except StopIteration:
            return

    async def _run_async(self, exc: BaseException | None) -> None:
        steps = self._steps(exc)
        try:
            awaitable = next(steps)
            while True:
                try:
                    await awaitable
                except BaseException as error:
                    # Failed or cancelled: the generator takes note, and runs the other steps
                    # before `_raise_errors` passes on what is no Exception.
                    awaitable = steps.throw(error)
                else:
                    awaitable = next(steps)
        except StopIteration:
            return

    def _steps(self, exc: BaseException | None) -> Generator[Awaitable[Any], None, None]:
        """Clean up, last-in first-out; yields whatever has to be awaited."""
        policy = self._policy
        work = Release(collect=policy.collect, trim_host=policy.trim_host, thorough=policy.thorough)
        while self.items:
            item = self.items.pop()
            try:
                result = item.run(work)
                if inspect.isawaitable(result):
                    yield result
            except BaseException as error:
                # The boundary between one step and the next: all of them run, whatever the
                # others raise.
                work.failed(item.name, error)
            del item
        if exc is not None and not is_shutting_down() and is_out_of_memory(exc):
            clear_exception_frames(exc)
        restore_flags(self._flags)
        self.report = work.finish()
        self._errors = work.errors
        self._on_end(self)

    def _raise_errors(self, exc: BaseException | None) -> None:
        """Note the errors on the block's exception; without one, raise what must be raised."""
        if exc is not None:
            for error in self._errors:
                add_note(exc, f"the cleanup after this also failed: {error!r}")
            return
        for error in self._errors:
            if not isinstance(error, Exception):
                raise error
        failures = [error for error in self._errors if isinstance(error, Exception)]
        if failures and self._policy.strict:
            steps = "a step" if len(failures) == 1 else f"{len(failures)} steps"
            raise CleanupError(f"{steps} of the cleanup failed", failures)


def caller_key() -> tuple[int, Any]:
    """Tell callers apart: the thread, and the asyncio task where there is one."""
    asyncio = sys.modules.get("asyncio")
    try:
        task = asyncio.current_task() if asyncio is not None else None
    except (RuntimeError, AttributeError):  # No event loop runs here, or asyncio half-imported.
        task = None
    return get_ident(), task


def needs_argument(function: Callable[..., Any]) -> bool:
    """Say whether a closer wants the object that it closes."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # A builtin that does not tell.
        return False
    return False
