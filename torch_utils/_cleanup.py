"""SafePyTorchCleanup: a scope that releases its resources at its end."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import AsyncContextDecorator, ContextDecorator, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

from torch_utils._memory import query
from torch_utils._oom import clear_exception_frames, is_out_of_memory
from torch_utils._registry import REGISTRY
from torch_utils._release.objects import Kinds, is_instance, name_of
from torch_utils._release.roots import roots_of
from torch_utils._release.run import Collect, Options, Release, place_of_caller
from torch_utils._report import CleanupReport
from torch_utils._resource import Resource, add_note, takes_precedence
from torch_utils._runtime import MODULES, is_shutting_down, loaded_torch
from torch_utils._signals import DeferredSignals
from torch_utils.errors import CleanupError, TorchUtilsError, repr_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="SafePyTorchCleanup")


class _Step:
    """A function to call at the end of a block, or an object to release.

    An open resource is kept by its entry in the registry, and so only until it is closed.
    """

    def __init__(
        self, name: str, function: Callable[[], Any] | None = None, thing: Any = None
    ) -> None:
        self._name, self._function = name, function
        self._find: Callable[[], Any] = lambda: thing
        self._entry = REGISTRY.get(id(thing)) if is_instance(thing, Resource) else None
        if self._entry is not None:
            self._entry.kept, self._find = thing, weakref.ref(thing)

    def bind(self, work: Release) -> tuple[str, Callable[[], Any]]:
        """Return the arguments of `Release.call`. They do not refer to this step."""
        if self._function is not None:
            return self._name, self._function
        thing = self._find()
        if self._entry is not None:
            self._entry.kept = None
        return self._name, functools.partial(work.empty, [thing], were_accepted=True)


@dataclass(eq=False, repr=False)
class _Block(Resource):
    """The steps of one ``with`` block's cleanup. Closing it runs them, the newest first.

    Attributes:
        options: How to release.
        place: Where the block is, in messages.
        steps: Objects to release, and functions to call, with their names.
        flags: torch's global flags at the start of the block.
        exception: The exception of the block.
        work: The release, once it has begun.
        is_open: Whether steps can be added.
    """

    options: Options
    place: str
    steps: list[_Step]
    flags: dict[str, Any]
    exception: BaseException | None = None
    work: Release | None = None
    report: CleanupReport | None = None
    pid: int = field(default_factory=os.getpid)
    is_open: bool = True

    def begin(self) -> Release:
        """Return the release of this block, which begins with its first step."""
        if self.work is None:
            self.work = Release(self.options, self.place)
        return self.work

    def add(self, step: _Step) -> None:
        """Add a step.

        Raises:
            TorchUtilsError: The block has ended in another thread.
        """
        self.steps.append(step)
        if not self.is_open:  # The last look at the steps comes after this becomes False.
            try:
                self.steps.remove(step)
            except ValueError:
                return  # The end of the block has taken it.
            raise _not_open()

    def _release(self) -> None:
        work = self.begin()
        while self.is_open or self.steps:
            self.is_open = bool(self.steps)
            if self.steps:
                work.call(*self.steps.pop().bind(work))
        exc = None if is_shutting_down() else self.exception
        is_memory_error = exc is not None and is_out_of_memory(exc)
        if exc is not None and is_memory_error:
            clear_exception_frames(exc)
        if self.flags:
            _restore_flags(self.flags)
        self.report = work.report(after_memory_error=is_memory_error)

    async def run_all(self) -> None:
        """Run the steps in an event loop, and await their results.

        Raises:
            BaseException: A signal handler raised it meanwhile.
        """
        work, interrupts = self.begin(), list[BaseException]()
        while self.steps:
            result = None
            try:
                with DeferredSignals():
                    result = work.call(*self.steps.pop().bind(work), awaits=True)
            except BaseException as interrupt:  # Raised by a signal's handler.
                interrupts.append(interrupt)
            if not inspect.isawaitable(result):
                continue
            try:
                await result
            except GeneratorExit:
                raise  # The coroutine is being closed and can no longer await.
            except BaseException as error:
                # A step failed or was cancelled; the others run nevertheless.
                work.failed("a callback", error)
        if interrupts:
            raise interrupts.pop(0)

    def raise_errors(self, is_strict: bool) -> None:
        """Add the errors as notes to the exception of the block, or raise them if it succeeded."""
        exc, self.exception = self.exception, None
        errors = [] if self.work is None else self.work.errors
        if exc is not None:
            for error in errors:
                add_note(exc, f"the cleanup after this also failed: {repr_of(error)}")
        for error in errors:
            if takes_precedence(error, exc):
                raise error
        failures = [error for error in errors if isinstance(error, Exception)]
        if failures and is_strict and exc is None:
            steps = "a step" if len(failures) == 1 else f"{len(failures)} steps"
            raise CleanupError(f"{steps} of the cleanup failed", failures)


_Block.__name__ = "SafePyTorchCleanup"  # in messages


class SafePyTorchCleanup:
    """A scope that releases models, tensors and other resources at the end of a block.

    ::

        with SafePyTorchCleanup() as scope:
            model = scope.manage(SentenceTransformer("all-MiniLM-L6-v2"))
            serve(model)
        print(scope.report)

    It also works as ``async with``, and as a decorator of functions and coroutine functions. A
    scope has one block at a time and may be used again afterwards. As a decorator, it gives each
    call a scope of its own with the same options. Manage what the function creates in a ``with``
    block inside it.

    What is managed is released last-in first-out, each step on its own. An exception in the
    block wins, unless only an error of the cleanup ends the program, such as a SystemExit. What
    fails in the cleanup is noted on it, logged, and listed in the report. After an out-of-memory
    error the frames of the whole exception chain are cleared and garbage is collected, so that the
    tensors in them go. A scope that is open when the program ends is closed
    then, while all modules are intact; a forked child never closes its parent's.

    Args:
        *resources: Objects to release at the end; of any kind that `release` supports.
        collect: See `release`.
        trim_host: See `release`.
        thorough: See `release`.
        restore_flags: Restore torch's global flags: cudnn, matmul precision, determinism, grad
            mode, default dtype and device, number of threads.
        strict: Raise `CleanupError`, an ExceptionGroup, if the block succeeded but steps of the
            cleanup failed.

    Attributes:
        report: The report of the last cleanup; None before the first.

    Raises:
        TypeError: `release` does not support the type of a resource.
        ValueError: ``collect`` is not one of its values.
    """

    _block: _Block | None = None

    def __init__(
        self,
        *resources: Any,
        collect: Collect = "auto",
        trim_host: bool = True,
        thorough: bool = False,
        restore_flags: bool = False,
        strict: bool = False,
    ) -> None:
        self._resources = resources
        self._options = Options(collect, trim_host, thorough=thorough)
        roots_of(resources, Kinds(), f"{type(self).__name__}()")
        self._restores_flags, self._strict = restore_flags, strict
        self.report: CleanupReport | None = None

    def manage(self, obj: T, close: Callable[..., Any] | None = None) -> T:
        """Release an object at the end of the block.

        Args:
            obj: An object of a kind that `release` supports; any object if ``close`` is passed.
            close: Called instead of `release`, with the object if it needs an argument.

        Returns:
            The object.

        Raises:
            TypeError: `release` can never support ``obj`` and there is no ``close``, or ``close``
                is not callable with the object or without arguments.
            TorchUtilsError: The scope is not open, or the parent process opened it.
        """
        if close is None:
            block = self._open_block()
            roots_of([obj], Kinds(), "manage()")
            block.add(_Step(name_of(type(obj)), thing=obj))
        else:
            is_given = callable(close) and _needs_argument(close, obj)
            self.callback(close, *([obj] if is_given else []))
        return obj

    def callback(self, fn: F, *args: Any, **kwargs: Any) -> F:
        """Call a function at the end of the block.

        Args:
            fn: The function. An ``async with`` block awaits a coroutine function.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The function.

        Raises:
            TypeError: ``fn`` is not callable.
            TorchUtilsError: The scope is not open, or the parent process opened it.
        """
        block = self._open_block()
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}; pass it without calling it")
        name = getattr(fn, "__qualname__", repr(fn))
        block.add(_Step(name, functools.partial(fn, *args, **kwargs)))
        return fn

    def __enter__(self: Self) -> Self:
        with DeferredSignals():
            steps = [_Step(name_of(type(one)), thing=one) for one in self._resources]
            flags = _read_flags() if self._restores_flags else {}
            block = _Block(self._options, place_of_caller(), steps, flags)
            # Atomic, because two threads may enter the same scope.
            if vars(self).setdefault("_block", block) is block:
                return self
            block.steps.clear()
            block.close()
        name = type(self).__name__
        raise TorchUtilsError(f"this {name} is open already; create a {name} for each block")

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        block = self._block
        if block is None:
            return
        block.exception = exc
        try:
            block.close()
        except BaseException as interrupt:  # A signal was delivered at its end.
            block.exception = interrupt  # A variable would be a cycle.
            raise
        finally:
            self.report = block.report or self.report
            vars(self).pop("_block", None)
            if block.work is not None and block.work.errors:
                block.raise_errors(self._strict)
            block.exception = None

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        block = self._block
        try:
            # If the coroutine is being closed, it can no longer await.
            if block is not None and not isinstance(exc, GeneratorExit):
                await block.run_all()
        except BaseException as interrupt:  # A signal was delivered meanwhile.
            exc = interrupt
            raise
        finally:
            try:
                self.__exit__(exc_type, exc, trace)
            finally:
                exc = None  # A cycle.

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function.

        Each call gets a scope of its own with the same options.

        Raises:
            TypeError: ``function`` is a class, a generator function or not callable, or the scope
                has resources, which would be released at the end of the first call.
        """
        name = f"{type(self).__name__}()"
        if self._resources:
            raise TypeError(
                f"{name} takes no resources as a decorator; manage them in a block in the function"
            )
        is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if is_generator or isinstance(function, type) or not callable(function):
            raise TypeError(
                f"{name} decorates functions and coroutine functions, not {function!r}; use a with "
                "block instead"
            )
        is_coroutine = inspect.iscoroutinefunction(function)
        decorate = AsyncContextDecorator if is_coroutine else ContextDecorator
        return decorate.__call__(self, function)  # type: ignore[arg-type]

    def _recreate_cm(self: Self) -> Self:
        """Return the scope of one call; contextlib's decorators call this."""
        scope = copy.copy(self)
        vars(scope).pop("_block", None)
        scope.report = None
        return scope

    def _open_block(self) -> _Block:
        block, name = self._block, type(self).__name__
        if block is None or not block.is_open:
            raise _not_open(name)
        if block.pid != os.getpid():
            raise TorchUtilsError(f"this {name} is of the parent process; open another one here")
        return block


def _not_open(name: str = "SafePyTorchCleanup") -> TorchUtilsError:
    return TorchUtilsError(f"this {name} is not open; use it inside its with block")


def _needs_argument(function: Callable[..., Any], obj: Any) -> bool:
    """Return whether a ``close`` function needs the object as its argument.

    A builtin without a signature gets it, unless it is a method of an object.

    Raises:
        TypeError: The function can be called neither way.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        owner = getattr(function, "__self__", None)
        return owner is None or inspect.ismodule(owner)
    for arguments in ((), (obj,)):
        with suppress(TypeError):
            signature.bind(*arguments)
            return bool(arguments)
    raise TypeError(
        f"close={function!r} must be callable without arguments, or with the object alone"
    )


# torch's global flags

_SETTERS = {
    "get_default_dtype": "set_default_dtype",
    "get_num_threads": "set_num_threads",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "is_grad_enabled": "_C._set_grad_enabled",
    # Missing if no default device was set: to set "cpu" would slow down every later call.
    "_GLOBAL_DEVICE_CONTEXT.device_context.device": "set_default_device",
}
_ATTRIBUTES = (
    *(f"backends.cudnn.{n}" for n in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)


def _read(torch: Any, name: str) -> Any:
    value = attrgetter(name)(torch)
    return value if "." in name else value()


def _set(torch: Any, name: str, value: Any) -> None:
    # use_deterministic_algorithms also sets a flag of torch.compile, and would import it.
    if name == "get_deterministic_debug_mode" and "torch._inductor.config" in MODULES:
        torch.use_deterministic_algorithms(value > 0, warn_only=value == 1)
    elif name in _SETTERS:
        attrgetter(_SETTERS[name])(torch)(value)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(torch), attribute, value)


def _read_flags() -> dict[str, Any]:
    """Return the value of every flag of this torch by name; empty without torch. Never raises.

    It is None for a flag that this build lacks, or that torch refuses to read because the program
    mixes its two settings of TF32.
    """
    torch = loaded_torch()
    names = (*_SETTERS, *_ATTRIBUTES) if torch is not None else ()
    return {
        name: query(functools.partial(_read, torch, name), None, f"flag {name}") for name in names
    }


def _restore_flags(before: dict[str, Any]) -> None:
    """Restore the flags that changed since `_read_flags`, and no others. Never raises.

    Does nothing during shutdown.
    """
    torch, now = loaded_torch(), {} if is_shutting_down() else _read_flags()
    for name in now.keys() & before.keys():
        if before[name] != now[name]:
            query(functools.partial(_set, torch, name, before[name]), None, f"restore flag {name}")
