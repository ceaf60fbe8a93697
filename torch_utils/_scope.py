"""What a cleanup scope has open between one ``__enter__`` and its end, and how it is told apart.

One scope may be open many times at once. A with statement, like an exit stack, fetches
``__exit__`` before it calls ``__enter__``, and calls later what it has fetched (PEP 343). So each
fetch gives a new function that knows what it will end; nothing has to be guessed from the order.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol
from weakref import ref

from torch_utils._flags import read_flags, restore_flags
from torch_utils._interrupts import never_began
from torch_utils._openings import ENTERED, frame_key, frames_of
from torch_utils._registry import REGISTRY, Claim, Entry
from torch_utils._releasing.classes import name_of
from torch_utils._releasing.plan import plan
from torch_utils._releasing.work import Release, caller_key
from torch_utils._runtime import DEBUG, ERROR, is_shutting_down, log
from torch_utils.errors import CleanupError, shown
from torch_utils.oom import Handled
from torch_utils.report import CleanupReport
from torch_utils.resource import add_note


class Scope(Protocol):
    """What an open scope has to know about the scope that it is of."""

    _release_options: dict[str, Any]
    _restore_flags: bool
    _strict: bool

    def _ended(self, opened: OpenScope) -> None: ...


@dataclass(eq=False)
class Item:
    """An object to release, or a function to call, at the end.

    Attributes:
        name: What messages call it.
        thing: The object to release, where there is no function.
        left: What is left to do of it. None before it has begun.
    """

    name: str
    thing: Any = None
    function: partial[Any] | None = None
    left: Any = None


class OpenScope(Entry):
    """One opening of a scope: what it manages until it ends.

    The registry holds it as long as it is open: it is closed at exit, whoever has forgotten it.
    Its cleanup is made of pieces of which each can be repeated or knows that it has run, so that
    an interrupt at any instruction leaves nothing out.
    """

    def __init__(self) -> None:
        super().__init__(id(self), "", owner=_nobody, release=_nobody)
        self.scope: Scope | None = None
        self.items: list[Item] = []
        self.report: CleanupReport | None = None
        self.fetched_from: Any = None
        self.leave: ref[Any] | None = None  # the function that ends it, while somebody holds that
        self.outside: tuple[OpenScope, ...] = ()
        self.frame = (0, 0)
        self.exception: BaseException | None = None  # the block's
        self._results: list[Any] = []
        self._errors: list[BaseException] = []
        self._work: Release | None = None
        self._last = list(_LAST)

    def begin(self, scope: Scope, resources: tuple[Any, ...], frame: FrameType) -> None:
        """Open it, for the with statement that the frame is executing."""
        self.scope = scope
        self.name = type(scope).__name__
        self.items.extend(Item(name_of(type(thing)), thing) for thing in resources)
        self._handled = Handled()  # What is older than the block is not of it.
        self._flags = read_flags() if scope._restore_flags else {}
        self.frame = frame_key(frame)
        self.caller = caller_key()
        entered = tuple(o for o in ENTERED.get() if not o.has_ended)
        around = set(frames_of(frame)) if entered else ()
        self.outside = tuple(
            o for o in entered if o.caller != self.caller or (o.is_block and o.frame in around)
        )
        ENTERED.set((*entered, self))
        function = None if self.leave is None else self.leave()
        # Whoever drops that function without having called it will never end this.
        self.leave = None if function is None else ref(function, self._abandoned)
        REGISTRY.add(self)

    def forget(self) -> None:
        """Undo an opening that an interrupt broke off: nobody has it in hand."""
        self.items.clear()
        self.leave = None
        REGISTRY.discard(self)

    @property
    def is_block(self) -> bool:
        """Whether a with statement opened it, and no exit stack, and nobody by hand."""
        return self.fetched_from is self.scope

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and nobody has begun to end it."""
        return REGISTRY.get(self.key) is self and "claim" not in self.__dict__

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be managed by it."""
        return REGISTRY.get(self.key) is not self

    @property
    def failures(self) -> list[BaseException]:
        """What its cleanup has raised so far; the report has it at the end."""
        return [] if self._work is None else list(self._work.errors)

    def end(self, exc: BaseException | None) -> None:
        """Clean up, and raise what has to be raised."""
        self.exception = exc
        self.close()
        self._raise_errors(exc)

    async def end_async(self, exc: BaseException | None, _leave: Any) -> None:
        """Clean up, and await what has to be awaited.

        A coroutine that is being closed, in its block or here, can await nothing any more: the
        rest is done all the same. Holds the function that ends it: when that dies and this has
        not run to its end, the rest is done then.
        """
        self.exception = exc
        if _comes_from_closing(exc):
            return self.end(exc)
        mine = Claim(self.caller[0], is_async=True)
        try:
            if not self.win(mine, timeout_s=-1):
                return None
            await self._await_all()
            self.give_up(mine, self)
            self.finish(mine)
        except GeneratorExit:
            self.go_on(mine, self)
            raise
        except BaseException:  # An interrupt of this code: what can still be awaited is.
            if self.__dict__.get("claim") is mine:
                await self._await_all()
            self.go_on(mine, self)
            raise
        if REGISTRY.after_close is not None:
            REGISTRY.after_close(True)
        return self._raise_errors(exc)

    def pieces(self, owner: Any) -> Iterator[Any]:
        """Return what closes it; unlike a generator, it outlives an exception."""
        return iter(self._do_next, None)

    def _do_next(self) -> bool | None:
        """Do one piece of the cleanup; None when there is nothing left to do."""
        if self._results:
            self._refuse_to_await(self._begin_work())
        elif self.items:
            self._run_newest(self._begin_work())
        elif self._last:
            try:
                self._last[-1](self)
            except Exception as error:
                # One piece must not keep the others from being done.
                log(ERROR, "the end of %s failed: %r", self.name, error, exc_info=error)
            self._last.pop()
        else:
            return None
        return True

    async def _await_all(self) -> None:
        while self._results or self.items:
            work = self._begin_work()
            if not self._results:
                self._run_newest(work)
                continue
            try:
                if (coroutine := self._to_await()) is not None:
                    await coroutine
            except GeneratorExit:
                raise
            except BaseException as error:
                # Failed or cancelled: the others are awaited all the same, before
                # `_raise_errors` passes on what is no Exception.
                work.failed("what a callback returned", error)
                continue
            self._results.clear()

    def _begin_work(self) -> Release:
        if self._work is None:
            assert self.scope is not None
            self._work = Release(**self.scope._release_options)
        self._work.begin()
        return self._work

    def _run_newest(self, work: Release) -> None:
        """Run what was managed last; what a function returns is left in the results."""
        item = self.items[-1]
        try:
            if item.function is not None:
                work.is_idle = False
                if item.left is None:
                    item.left = map(partial.__call__, (item.function,))
                self._results.extend(item.left)  # Once: see `_interrupts`.
            else:
                if item.left is None:
                    item.left = plan([item.thing], again=True)
                work.run(item.left)
            if self.items[-1] is item:  # Or something was added meanwhile, and comes first.
                self.items.pop()
        except BaseException as error:
            # The boundary between one item and the next: each is run, whatever the others raise.
            # This one comes again: with what is left to do of it.
            if never_began(error):
                item.left = None
            elif isinstance(error, Exception):
                item.left = item.left or ()
            work.failed(item.name, error)

    def _to_await(self) -> Any:
        """Return the coroutine that is in the results, unless it has run, or there is none."""
        result = self._results[-1]
        if not inspect.isawaitable(result):
            return None
        if not inspect.iscoroutine(result):  # Only these can be closed, and say whether they ran.
            result = self._results[-1] = _wait(result)
        return None if inspect.getcoroutinestate(result) == inspect.CORO_CLOSED else result

    def _refuse_to_await(self, work: Release) -> None:
        if (coroutine := self._to_await()) is not None:
            coroutine.close()  # Or it would warn that it was never awaited.
            work.failed(
                "what a callback returned",
                TypeError(
                    "what this callback returned must be awaited: use `async with`, in a "
                    "coroutine that is not being closed"
                ),
            )
        self._results.clear()

    def _clear_frames(self) -> None:
        exc = self.exception
        if exc is not None and not is_shutting_down() and self._handled.is_out_of_memory(exc):
            self._handled.clear_frames(exc)

    def _restore_flags(self) -> None:
        if self._flags:
            restore_flags(self._flags)

    def _make_report(self) -> None:
        work = self._begin_work()
        try:
            self.report = work.finish()
        finally:
            work.end()
        self._errors = work.errors

    def _publish(self) -> None:
        assert self.scope is not None
        self.leave = None
        self._work = None
        self.outside = ()
        ENTERED.set(tuple(o for o in ENTERED.get() if o is not self and not o.has_ended))
        self.scope._ended(self)

    def _raise_errors(self, exc: BaseException | None) -> None:
        """Note the errors on the block's exception; without one, raise what must be raised."""
        errors, self._errors, self.exception = self._errors, [], None
        if exc is not None:
            for error in errors:
                add_note(exc, f"the cleanup after this also failed: {shown(error)}")
            return
        for error in errors:
            if not isinstance(error, Exception):
                raise error
        failures = [error for error in errors if isinstance(error, Exception)]
        if failures and self.scope is not None and self.scope._strict:
            steps = "a step" if len(failures) == 1 else f"{len(failures)} steps"
            raise CleanupError(f"{steps} of the cleanup failed", failures)

    def _abandoned(self, _reference: ref[Any]) -> None:
        """End what nobody can end any more.

        An interrupt between the end of a block and the first instruction of ``__exit__`` skips
        that; CPython cannot avoid it (bpo-29988). An exit stack may be dropped, too.
        """
        try:
            if not self.has_ended:
                log(DEBUG, "%s was left without its end", self.name)
                claim = self.__dict__.get("claim")
                if claim is None:
                    self.close()
                else:
                    self.go_on(claim, self)
        except BaseException as error:  # As in a destructor: there is nobody to tell.
            log(DEBUG, "ending %s: %r", self.name, error)


def _nobody(subject: Any = None) -> None: ...


_LAST = (
    OpenScope._publish,
    OpenScope._make_report,
    OpenScope._restore_flags,
    OpenScope._clear_frames,
)
"""What comes after everything was released, the first last."""

_FETCHED = threading.local()


class FetchedExit:
    """``__exit__`` of a scope: each fetch makes the function that ends one opening of it.

    Args:
        leave: What that function calls, with the opening and the scope before its arguments.
    """

    def __init__(self, leave: Callable[..., Any]) -> None:
        self._leave = leave

    def __get__(self, scope: Any, kind: type | None = None) -> Callable[..., Any]:
        opened = OpenScope()
        # Exit stacks fetch it from the class, and pass the scope as the first argument.
        bound = (opened,) if scope is None else (opened, scope)
        opened.fetched_from = kind if scope is None else scope
        function = partial(self._leave, *bound)
        opened.leave = ref(function)
        _FETCHED.last = ref(opened)
        return function


def last_fetched(scope: Any) -> OpenScope:
    """Return what the function will end that was fetched last, if for this scope; or a new one."""
    reference = getattr(_FETCHED, "last", None)
    opened: OpenScope | None = None if reference is None else reference()
    _FETCHED.last = None
    if opened is not None and opened.scope is None:
        origin = opened.fetched_from
        if origin is scope or (isinstance(origin, type) and isinstance(scope, origin)):
            return opened
    return OpenScope()


def _comes_from_closing(exc: BaseException | None) -> bool:
    """Say whether a block ends because the coroutine that it is in is being closed."""
    traceback = exc.__traceback__ if isinstance(exc, GeneratorExit) else None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_flags & inspect.CO_COROUTINE:
            return True
        traceback = traceback.tb_next
    return False


async def _wait(awaitable: Awaitable[Any]) -> None:
    await awaitable
