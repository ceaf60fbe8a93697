"""Resource: something that is closed exactly once, at exit at the latest."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar
from warnings import warn

from torch_utils._deferral import DeferredSignals
from torch_utils._registry import REGISTRY, Entry
from torch_utils._runtime import DEBUG, early_bound, is_shutting_down, log
from torch_utils.errors import ResourceClosedError, shown

__all__ = ["Resource", "closes_on_error"]

Self = TypeVar("Self", bound="Resource")
I = TypeVar("I", bound=Callable[..., None])  # noqa: E741  (of an initialiser)
_RUNS_LATER = 0x20 | 0x80 | 0x200  # generator, coroutine, asynchronous generator (inspect.CO_*)


class Resource:
    """Base of what holds something that must be given up: a model, an index, a pool.

    A subclass overrides `_release`, which runs exactly once per object: at `close`, at the end
    of a ``with`` block, when the object is garbage-collected, or at exit while every module is
    still intact; at exit the newest is closed first. It need not call ``super().__init__()``::

        class Index(Resource):
            def __init__(self, path):
                self.handle = open_index(path)

            def _release(self):
                self.handle.free()

    What `_release` raises comes out of `close` and of the ``with`` block; the resource counts as
    closed. An exception of the block wins and gets a note. In a destructor and at exit the error
    goes to `sys.unraisablehook`.

    Signals: while the main thread closes something, Python-level handlers of SIGINT, SIGTERM,
    SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2 are put off, and run right after it. A second SIGINT is
    delivered at once. An interrupt before that leaves
    the resource open, for the next `close` or for exit.

    Threads: any thread may close; a second one waits until the first is done, and a call from
    inside `_release` returns at once. Forks: a child's copy of its parent's resource is never
    released in the child, which may open and close resources of its own. Copying and pickling
    are refused, because two owners of one thing cannot each close it once.

    A `_release` that is a coroutine function or a generator is a TypeError in the class statement.

    Do not override ``__del__``; a subclass that must, calls this one.
    """

    # No state lives on the instance, so that `_release` may clear ``__dict__``, subclasses may
    # have __slots__, and other bases (nn.Module, ABC, pydantic's models) combine with this one.
    __slots__ = ("__weakref__",)

    close_at_exit: ClassVar[bool] = True
    """False leaves it to the program: for what a daemon thread uses to the very end."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        code = getattr(cls._release, "__code__", None)
        if code is not None and code.co_flags & _RUNS_LATER:
            raise TypeError(
                f"{cls.__name__}._release must be a plain function: calling it has to do all the "
                "work, and nobody would await or iterate what it returns"
            )

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        """Register the object, before its ``__init__`` acquires anything."""
        if cls._release is Resource._release:
            raise TypeError(
                f"{cls.__name__} must override _release(), which gives up what it holds"
            )
        if super().__new__ is object.__new__:
            self = super().__new__(cls)
        else:
            self = super().__new__(cls, *args, **kwargs)
        REGISTRY.add(
            Entry(id(self), cls.__name__, weakref.ref(self), cls._release, cls.close_at_exit)
        )
        return self

    def _release(self) -> None:
        """Give up what this object holds. Called once; see the class for when."""

    @property
    def closed(self) -> bool:
        """Whether it is closed. `_release` itself still sees it open."""
        entry = REGISTRY.get(id(self))
        return entry is None or entry.is_closed()

    def ensure_open(self) -> None:
        """Raise unless it is open; the first line of a method that needs what it holds.

        Raises:
            ResourceClosedError: It was closed.
            SystemExit: It was closed by the end of the program and the caller is a daemon
                thread, which this ends without a traceback on stderr.
        """
        if not self.closed:
            return
        name = type(self).__name__
        raise closed_error(
            f"this {name} is closed; create a new one, or keep it open for as long as it is used"
        )

    def close(self) -> bool:
        """Release what it holds, if that has not happened yet. Idempotent.

        Returns:
            True if this call ran `_release`.

        Raises:
            BaseException: What `_release` raised.
        """
        entry = REGISTRY.get(id(self))
        return entry is not None and entry.close(self)

    async def aclose(self) -> bool:
        """Close from a coroutine.

        It never suspends, so it cannot be cancelled halfway.
        """
        return self.close()

    def __enter__(self: Self) -> Self:
        self.ensure_open()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        entry = REGISTRY.get(id(self))
        try:
            # Not by attributes: `release` may have emptied this object in its own block.
            Resource.close(self)
        except BaseException as error:
            if exc is None or entry is None or entry.raised != id(error):
                raise
            # What the block raised is what the program needs to see.
            add_note(exc, f"releasing {entry.name} also failed: {shown(error)}")

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        self.__exit__(exc_type, exc, trace)

    @early_bound
    def __del__(self) -> None:
        entry = REGISTRY.get(id(self))
        if entry is None or (is_shutting_down() and not entry.at_exit):
            return
        signals = DeferredSignals(in_destructor=True)  # It delivers when this frame ends.
        with signals:
            closed = entry.close(self, timeout_s=0)
        if closed and not is_shutting_down():
            # Last, because ``-W error`` turns it into an exception.
            warn(
                f"unclosed {entry.name} was garbage-collected; close it, or use it in a with block",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __ray_shutdown__(self) -> None:
        """Close; Ray calls this when an actor ends in order."""
        self.close()

    def __copy__(self) -> NoReturn:
        self._refuse("copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be {what}: two owners cannot each close one resource. "
            "Create another one where it is needed"
        )


def add_note(error: BaseException, note: str) -> None:
    """Attach a note, which a traceback prints from Python 3.11 on. Never raises."""
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 prints no notes; other tools may.
            error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]
    except Exception as failure:
        # A class of its own may refuse notes; its error must not be replaced by another.
        log(DEBUG, "no note on a %s: %r", type(error).__name__, failure)


def closes_on_error(init: I) -> I:
    """Decorate an ``__init__``: if it raises, the resource is closed at once.

    Otherwise the destructor closes what is half built, and warns that nobody closed it.
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
