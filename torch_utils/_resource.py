"""Resource: an object that is closed exactly once, at exit at the latest."""

from __future__ import annotations

import functools
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, NoReturn, TypeVar
from warnings import warn

from torch_utils._registry import QUIET_THREADS, REGISTRY, Entry
from torch_utils._runtime import early_bound, is_shutting_down
from torch_utils.errors import ResourceClosedError, repr_of

Self = TypeVar("Self", bound="Resource")
CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200  # As in `inspect`.
I = TypeVar("I", bound=Callable[..., None])  # noqa: E741  (of an initialiser)


class Resource:
    """Base class of objects that must be closed, such as a model, an index or a pool.

    A subclass overrides `_release`, which runs exactly once per object: at `close`, at the end
    of a ``with`` block, when the object is garbage-collected, or at exit. At exit the newest
    resource is closed first, while every module is intact. A subclass need not call
    ``super().__init__()``::

        class Index(Resource):
            def __init__(self, path):
                self.handle = open_index(path)

            def _release(self):
                self.handle.free()

    `close` and the ``with`` block raise what `_release` raises; the resource is closed
    nevertheless. If the block raised as well, its exception wins and gets a note, unless only
    the error of `_release` ends the program, such as KeyboardInterrupt. In a destructor and at
    exit the exception goes to `sys.unraisablehook`.

    Signals: while the main thread closes a resource, the Python-level handlers of SIGINT, SIGTERM,
    SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 are deferred; they run right afterwards. A second SIGINT
    is delivered immediately. An interrupt before `_release` starts leaves the resource open, for
    the next `close` or the exit.

    Threads: any thread may close a resource. A second thread waits until the first has finished,
    and a call from inside `_release` returns immediately. Forks: a forked child never releases its
    parent's resources; it may open and close its own. Resources cannot be copied or pickled.

    `_release` must not be a coroutine function or a generator function, and `close` must not be
    overridden: the class statement raises TypeError. Do not override
    ``__del__``; a subclass that must do so has to call this one. If a destructor closes the
    resource and a deferred signal handler raises, Python prints that exception and continues, as it
    does in every destructor.
    """

    # No state lives on the instance, so that `_release` may clear ``__dict__``, subclasses may
    # have __slots__, and other bases (nn.Module, ABC, pydantic's models) combine with this one.
    __slots__ = ("__weakref__",)

    close_at_exit: ClassVar[bool] = True
    """Whether the exit callback closes it. Set False for what daemon threads use until the end."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not (getattr(cls.close, "__module__", None) or "").startswith("torch_utils."):
            raise TypeError(
                f"{cls.__name__} must not override close(), but override _release(); if another "
                "base has the close(), put Resource before it"
            )
        code = getattr(cls._release, "__code__", None)
        if code is not None and code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR | CO_GENERATOR):
            raise TypeError(
                f"{cls.__name__}._release() must be a plain function, not a coroutine function or "
                "a generator function, because destructors and the exit callback call it"
            )

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        """Create and register the object, before its ``__init__`` acquires anything."""
        if cls._release is Resource._release:
            raise TypeError(f"{cls.__name__} must override _release(), to release what it holds")
        if super().__new__ is object.__new__:
            self = super().__new__(cls)
        else:
            self = super().__new__(cls, *args, **kwargs)
        owner, at_exit = weakref.ref(self), cls.close_at_exit
        REGISTRY.add(Entry(id(self), cls.__name__, owner, cls._release, at_exit))
        return self

    def _release(self) -> None:
        """Release what this object holds. Called once; the class describes when."""

    @property
    def closed(self) -> bool:
        """Whether it is closed. Inside `_release` this is still False."""
        entry = REGISTRY.get(id(self))
        return entry is None or entry.is_closed()

    def ensure_open(self) -> None:
        """Raise an error if this resource is closed.

        Call it first in each method that needs what the resource holds.

        Raises:
            ResourceClosedError: The resource is closed.
            SystemExit: The resource was closed at exit and the caller is a daemon thread. This
                ends the thread without a traceback on stderr.
        """
        if not self.closed:
            return
        name = type(self).__name__
        raise closed_error(f"this {name} is closed; create another one, or close this one later")

    def close(self) -> bool:
        """Close the resource. Idempotent.

        Returns:
            True if this call ran `_release`.

        Raises:
            BaseException: `_release` raised it.
        """
        entry = REGISTRY.get(id(self))
        return entry is not None and entry.close(self)

    async def aclose(self) -> bool:
        """Close from a coroutine, as `close` does. It never suspends and cannot be cancelled.

        Returns:
            True if this call ran `_release`.
        """
        return self.close()

    def __enter__(self: Self) -> Self:
        self.ensure_open()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        entry = REGISTRY.get(id(self))
        try:
            # Not `self.close`: `release` may have emptied this object inside the block.
            Resource.close(self)
        except BaseException as error:
            is_own = entry is not None and entry.raised == id(error)
            if exc is None or not is_own or takes_precedence(error, exc):
                raise
            # The exception of the block is the one that matters.
            add_note(exc, f"releasing {type(self).__name__} also failed: {repr_of(error)}")

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self.__exit__(exc_type, exc, trace)

    @early_bound
    def __del__(self) -> None:
        entry = REGISTRY.get(id(self))
        if entry is None or (is_shutting_down() and not entry.at_exit):
            return
        closed = entry.close(self, timeout_s=0)
        if closed and get_ident() not in QUIET_THREADS and not is_shutting_down():
            # Last, because ``-W error`` turns the warning into an exception.
            warn(
                f"unclosed {entry.name} was garbage-collected; close it, or use it in a with block",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __ray_shutdown__(self) -> None:
        """Close the resource. Ray calls this when an actor ends normally."""
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; create another one")


def takes_precedence(error: BaseException, exc: BaseException | None) -> bool:
    """Return whether an error of the cleanup must be raised, whatever the block raised.

    KeyboardInterrupt and SystemExit must reach the program, which may catch an Exception.
    """
    return not isinstance(error, Exception) and (exc is None or isinstance(exc, Exception))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Never raises."""
    with suppress(Exception):  # A class of the program may refuse notes.
        error.add_note(note)


def closes_on_error(init: I) -> I:
    """Decorate an ``__init__`` so that the resource is closed if it raises.

    Without this, the destructor closes the half-built resource and warns that it was unclosed.
    """

    @functools.wraps(init)
    def wrapper(self: Resource, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            Resource.__exit__(self, type(error), error, error.__traceback__)
            raise

    return wrapper  # type: ignore[return-value]


def closed_error(message: str, kind: type[Exception] = ResourceClosedError) -> BaseException:
    """Return the error for the use of something that is closed.

    At shutdown a daemon thread gets a SystemExit, which ends it without a traceback on stderr.
    """
    threading = sys.modules.get("threading")
    if is_shutting_down() and threading is not None and threading.current_thread().daemon:
        return SystemExit(message)
    return kind(message)
