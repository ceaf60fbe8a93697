"""SafePyTorchCleanup: a scope at whose end models are released, whatever happened in it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import FrameType
from typing import Any, TypeVar

from torch_utils._openings import find_current
from torch_utils._releasing.classes import name_of
from torch_utils._releasing.plan import check_kinds
from torch_utils._releasing.work import Collect, check_collect
from torch_utils._scope import (
    FetchedExit,
    Item,
    OpenScope,
    last_fetched,
)
from torch_utils.errors import TorchUtilsError
from torch_utils.report import CleanupReport

__all__ = ["CleanupReport", "SafePyTorchCleanup"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="SafePyTorchCleanup")


def _leave(
    opened: OpenScope,
    scope: SafePyTorchCleanup,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: object,
) -> None:
    """What a scope's ``__exit__`` does."""
    ending = scope._to_end(opened, sys._getframe(1))
    if ending is not None:  # None where exit has ended it already.
        ending.end(exc)


def _leave_async(
    opened: OpenScope,
    scope: SafePyTorchCleanup,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: object,
) -> Coroutine[Any, Any, None]:
    """What a scope's ``__aexit__`` does."""
    ending = scope._to_end(opened, sys._getframe(1))
    leave = None if ending is None or ending.leave is None else ending.leave()
    return _nothing() if ending is None else ending.end_async(exc, leave)


async def _nothing() -> None: ...


async def _value(value: T) -> T:
    return value


class SafePyTorchCleanup:
    """Release models, tensors and other resources at the end of a block.

    ::

        with SafePyTorchCleanup() as scope:
            model = scope.manage(SentenceTransformer("all-MiniLM-L6-v2"))
            serve(model)
        print(scope.report)

    Also as ``async with``, and as a decorator of functions, coroutine functions, generators
    and asynchronous generators. One scope may be opened many times, nested in itself, and by
    several threads or tasks at once: each opening has its own resources. `manage` and
    `callback` add to the opening whose block the call is in. Where several are open and the call
    is in none of them, that is an error: a scope of its own for each is always clear.

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
        if len(resources) == 1 and inspect.isfunction(resources[0]):
            raise TypeError(
                f"as a decorator, {type(self).__name__} is called first: "
                f"@{type(self).__name__}(), with parentheses"
            )
        check_kinds(resources, f"{type(self).__name__}()")
        self._resources = resources
        self._release_options = {"collect": collect, "trim_host": trim_host, "thorough": thorough}
        self._restore_flags = restore_flags
        self._strict = strict
        self._open: list[OpenScope] = []
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
            TypeError: `release` would not know how, and there is no ``close``; or that is no
                function.
            TorchUtilsError: The scope is not open, or was opened by the parent process, or is
                open several times and the call is in none of its blocks. Nothing was done.
        """
        opened = self._current(sys._getframe(1))
        if close is None:
            check_kinds([obj], "manage()")
            opened.items.append(Item(name_of(type(obj)), obj))
        else:
            opened.items.append(_call(close, *((obj,) if _needs_argument(close) else ())))
        return obj

    def callback(self, fn: F, *args: Any, **kwargs: Any) -> F:
        """Have a function called at the end of the block; returns the function.

        A coroutine function is awaited, in an ``async with`` block.

        Raises:
            TypeError: It is no function.
            TorchUtilsError: As in `manage`.
        """
        self._current(sys._getframe(1)).items.append(_call(fn, *args, **kwargs))
        return fn

    def __enter__(self: Self) -> Self:
        self._begin(sys._getframe(1))
        return self

    def __aenter__(self: Self) -> Coroutine[Any, Any, Self]:
        self._begin(sys._getframe(1))
        return _value(self)

    __exit__ = FetchedExit(_leave)
    __aexit__ = FetchedExit(_leave_async)

    def __call__(self, function: F) -> F:
        """Decorate a function of any kind: each call opens the scope anew.

        Raises:
            TypeError: It is a class, which would be one no more, or no function at all.
        """
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"{type(self).__name__}() decorates functions and methods, not {function!r}"
            )
        wrapper: Any
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                async with self:
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
                async with self:
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with self:
                    return (yield from function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]

    def _begin(self, frame: FrameType) -> None:
        opened = last_fetched(self)
        try:
            opened.begin(self, self._resources, _user_frame(frame))
            self._open.append(opened)
        except BaseException:  # An interrupt: the block will not be entered.
            opened.forget()
            raise

    def opened(self) -> list[OpenScope]:
        """Return what is open of it now, for who has to say what it waits for."""
        return list(self._open)

    def _ended(self, opened: OpenScope) -> None:
        self._last_report = self._in_this_thread.report = opened.report
        if opened in self._open:
            self._open.remove(opened)

    def _current(self, frame: FrameType) -> OpenScope:
        """Return the opening that the call is in."""
        name = type(self).__name__
        everyones = [opened for opened in list(self._open) if not opened.has_ended]
        if not everyones:
            raise TorchUtilsError(f"this {name} is not open; use it inside its with block")
        candidates = [opened for opened in everyones if opened.pid == os.getpid()]
        if not candidates:
            raise TorchUtilsError(
                f"this {name} was opened by the parent process, which will release its own and "
                "nothing of this process; open a scope here"
            )
        found = find_current(candidates, frame)
        if found is None:
            raise TorchUtilsError(
                f"this {name} is open {len(candidates)} times, and this call is in none of their "
                "blocks, so that it cannot be told which is meant; make a scope for each"
            )
        return found

    def _to_end(self, fetched: OpenScope, frame: FrameType) -> OpenScope | None:
        """Return what a call of ``__exit__`` ends: what it was fetched for, if it was for one.

        Otherwise it is called by hand, and so was ``__enter__``.
        """
        if fetched.scope is not None:
            return fetched
        candidates = [opened for opened in list(self._open) if opened.is_open]
        by_hand = [o for o in candidates if o.leave is None or o.leave() is None]
        if not candidates:
            return None
        found = find_current(by_hand or candidates, _user_frame(frame))
        if found is None:
            raise TorchUtilsError(
                f"this {type(self).__name__} is open {len(candidates)} times, and a call of "
                "__exit__ by hand does not say which of them ends; use with statements or exit "
                "stacks, or make a scope for each. All are closed at the end of the program"
            )
        return found


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Item:
    if not callable(function):
        raise TypeError(
            f"what is called at the end must be a function, not {type(function).__name__}: pass it "
            "without calling it, and its arguments after it"
        )
    name = getattr(function, "__qualname__", repr(function))
    return Item(name, function=functools.partial(function, *args, **kwargs))


def _needs_argument(function: Callable[..., Any]) -> bool:
    """Say whether a closer wants the object that it closes."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # A builtin that does not tell.
        return False
    return False


def _user_frame(frame: FrameType) -> FrameType:
    """Return the frame that uses an exit stack, where that is what calls."""
    while frame.f_back is not None and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    return frame
