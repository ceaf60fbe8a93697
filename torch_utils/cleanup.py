"""SafePyTorchCleanup: a scope at whose end models are released, whatever happened in it."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_utils._coroutines import UNAWAITED, called_function, never_ran
from torch_utils._deferral import DeferredSignals
from torch_utils._registry import REGISTRY
from torch_utils._runtime import is_shutting_down
from torch_utils.errors import CleanupError, TorchUtilsError, shown
from torch_utils.flags import read_flags, restore_flags
from torch_utils.releasing.objects import name_of
from torch_utils.releasing.plan import check_kinds
from torch_utils.releasing.run import Collect, Release, check_collect
from torch_utils.report import CleanupReport
from torch_utils.resource import Resource, add_note

__all__ = ["CleanupReport", "SafePyTorchCleanup"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="SafePyTorchCleanup")


@dataclass(frozen=True)
class _Options:
    """What `SafePyTorchCleanup` was called with, but for the resources."""

    collect: Collect
    trim_host: bool
    thorough: bool
    restore_flags: bool
    strict: bool


@dataclass(frozen=True, eq=False)
class _Item:
    """An object to release, or a function to call, at the end of the block."""

    name: str
    thing: Any = None
    function: functools.partial[Any] | None = None


class _Block(Resource):
    """What one ``with`` block manages. Closing it releases the items, the newest first."""

    def __init__(self, name: str, options: _Options) -> None:
        self.items: list[_Item] = []
        self.running: _Item | None = None
        self.exception: BaseException | None = None  # the block's
        self.interrupt: BaseException | None = None  # of an await: a cancellation, a Ctrl-C
        self.report: CleanupReport | None = None
        self.pid = os.getpid()
        self._options = options
        self._work = Release(
            collect=options.collect, trim_host=options.trim_host, thorough=options.thorough
        )
        self._flags = read_flags() if options.restore_flags else {}
        if (entry := REGISTRY.get(id(self))) is not None:
            entry.name = name

    @property
    def errors(self) -> list[BaseException]:
        """What the items have raised so far."""
        return self._work.errors

    def _release(self) -> None:
        if not hasattr(self, "_flags"):
            return  # `__init__` has failed, near the recursion limit: nothing was managed.
        work = self._work
        with work.under_way():
            while self.items:
                result = self._run_newest()
                if type(result) in UNAWAITED:
                    work.failed("a callback", never_ran(result))
        exc = None if is_shutting_down() else self.exception
        if exc is not None and work.handled.is_out_of_memory(exc):
            work.handled.clear_frames(exc)
        if self._flags:
            restore_flags(self._flags)
        self.running = None
        self.report = work.finish()

    async def run_all(self) -> None:
        """Release the items in an event loop, and await what they return."""
        while self.items:
            result = None
            try:
                try:
                    with DeferredSignals(), self._work.under_way():
                        result = self._run_newest()
                finally:  # A signal may be delivered before it is awaited.
                    if inspect.isawaitable(result):
                        await result
            except GeneratorExit:
                raise  # The coroutine is being closed: it can await nothing any more.
            except BaseException as error:
                # Failed or cancelled: the other items are released all the same.
                self._work.failed("a callback", error)
                if not isinstance(error, Exception):
                    self.interrupt = error

    def _run_newest(self) -> Any:
        item = self.running = self.items.pop()
        try:
            if item.function is not None:
                return item.function()
            self._work.run([item.thing], is_again=True)
        except BaseException as error:
            # The boundary between one item and the next: each is run, whatever the others raise.
            self._work.failed(item.name, error)
        return None

    def raise_errors(self) -> None:
        """Note the errors on the block's exception; without one, raise what must be raised."""
        exc, self.exception = self.exception, None
        for error in self.errors:
            if exc is not None:
                add_note(exc, f"the cleanup after this also failed: {shown(error)}")
        if self.interrupt is not None and isinstance(exc, Exception):
            raise self.interrupt
        for error in self.errors:
            if exc is None and not isinstance(error, Exception):
                raise error
        failures = [error for error in self.errors if isinstance(error, Exception)]
        if failures and self._options.strict and exc is None:
            steps = "a step" if len(failures) == 1 else f"{len(failures)} steps"
            raise CleanupError(f"{steps} of the cleanup failed", failures)


class SafePyTorchCleanup:
    """Release models, tensors and other resources at the end of a block.

    ::

        with SafePyTorchCleanup() as scope:
            model = scope.manage(SentenceTransformer("all-MiniLM-L6-v2"))
            serve(model)
        print(scope.report)

    Also as ``async with``, and as a decorator of functions, coroutine functions, generators
    and asynchronous generators. A scope has one block at a time; it may be used again after that.
    As a decorator, each call gets a scope of its own with the same options; what the function
    creates is managed in a ``with`` block inside it.

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

    Attributes:
        report: What the last cleanup did; None before.

    Raises:
        TypeError: A resource is of a kind that `release` does not know.
        ValueError: ``collect`` is not one of its values.
    """

    _decorator: SafePyTorchCleanup | None = None  # whose call this is for

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
        self._options = _Options(collect, trim_host, thorough, restore_flags, strict)
        self._block: _Block | None = None
        self.report: CleanupReport | None = None

    def manage(self, obj: T, close: Callable[..., Any] | None = None) -> T:
        """Have an object released at the end of the block; returns the object.

        Args:
            obj: Anything that `release` takes, or anything at all if ``close`` is given.
            close: How to release it instead, called with the object if it needs an argument.

        Raises:
            TypeError: `release` would not know how, and there is no ``close``; or ``close`` is
                not callable.
            TorchUtilsError: The scope is not open, or was opened by the parent process.
        """
        if close is None:
            block = self._open_block()
            check_kinds([obj], "manage()")
            self._add(block, _Item(name_of(type(obj)), obj))
        elif _needs_argument(close):
            self._add_call(close, obj)
        else:
            self._add_call(close)
        return obj

    def callback(self, fn: F, *args: Any, **kwargs: Any) -> F:
        """Have a function called at the end of the block; returns the function.

        A coroutine function is awaited, in an ``async with`` block.

        Raises:
            TypeError: It is not callable.
            TorchUtilsError: As in `manage`.
        """
        self._add_call(fn, *args, **kwargs)
        return fn

    def __enter__(self: Self) -> Self:
        name = type(self).__name__
        if self._block is not None and not self._block.closed:
            raise TorchUtilsError(
                f"this {name} is open already, and has one block at a time; create a {name} for "
                "each block"
            )
        with DeferredSignals():
            self._block = block = _Block(name, self._options)
            block.items += [_Item(name_of(type(thing)), thing) for thing in self._resources]
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        block = self._block
        if block is not None:
            block.exception = exc
            self._close(block)

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        block = self._block
        if block is not None:
            block.exception = exc
            try:
                if not _is_being_closed(exc):
                    await block.run_all()
            finally:
                self._close(block)

    def _close(self, block: _Block) -> None:
        try:
            block.close()
        except BaseException as interrupt:  # A signal was delivered at the end of it.
            block.exception = interrupt
            raise
        finally:
            self.report = block.report or self.report
            if self._decorator is not None:
                self._decorator.report = self.report
            if block.closed:  # Or it was too near the recursion limit, and is closed later.
                self._block = None
                block.raise_errors()

    def __call__(self, function: F) -> F:
        """Decorate a function of any kind: each call has a scope of its own.

        Raises:
            TypeError: It is a class, or not callable.
        """
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"{type(self).__name__}() decorates functions and methods, not {function!r}"
            )
        called = called_function(function)
        wrapper: Any
        if inspect.isasyncgenfunction(called):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                async with self._scope_of_call():
                    generator = function(*args, **kwargs)
                    try:
                        value = await anext(generator)
                        while True:
                            try:
                                sent = yield value
                            except GeneratorExit:
                                raise
                            except BaseException as error:  # thrown in by the caller
                                value = await generator.athrow(error)
                            else:
                                value = await generator.asend(sent)
                    except StopAsyncIteration:
                        return
                    finally:
                        await generator.aclose()

        elif inspect.iscoroutinefunction(called):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                async with self._scope_of_call():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(called):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with self._scope_of_call():
                    return (yield from function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self._scope_of_call():
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]

    def _scope_of_call(self: Self) -> Self:
        scope = copy.copy(self)
        scope._block, scope.report, scope._decorator = None, None, self
        return scope

    def _open_block(self) -> _Block:
        block, name = self._block, type(self).__name__
        if block is None or block.closed:
            raise TorchUtilsError(f"this {name} is not open; use it inside its with block")
        if block.pid != os.getpid():
            raise TorchUtilsError(
                f"this {name} was opened by the parent process, which will release its own and "
                "nothing of this process; open a scope here"
            )
        return block

    def _add_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        block = self._open_block()
        if not callable(function):
            raise TypeError(
                f"what is called at the end must be callable, not {type(function).__name__}: "
                "pass it without calling it, and its arguments after it"
            )
        name = getattr(function, "__qualname__", repr(function))
        self._add(block, _Item(name, function=functools.partial(function, *args, **kwargs)))

    def _add(self, block: _Block, item: _Item) -> None:
        block.items.append(item)
        if block.closed and item in block.items:  # Another thread has ended it meanwhile.
            with suppress(ValueError):  # It is being released after all.
                block.items.remove(item)
                self._open_block()


def _is_being_closed(exc: BaseException | None) -> bool:
    """Say whether a block ends because its coroutine is closed, which can then await nothing."""
    traceback = exc.__traceback__ if isinstance(exc, GeneratorExit) else None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_flags & inspect.CO_COROUTINE:
            return True
        traceback = traceback.tb_next
    return False


def _needs_argument(function: Callable[..., Any]) -> bool:
    """Say whether a closer wants the object that it closes."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # A builtin that does not tell.
        return False
    return False
