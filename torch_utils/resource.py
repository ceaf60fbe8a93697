"""Resource: something that is closed exactly once, at exit at the latest."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from gc import is_finalized
from opcode import opmap
from sys import _getframe, getrefcount
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar
from warnings import warn

from torch_utils._interrupts import again_afterwards
from torch_utils._registry import REGISTRY, Entry
from torch_utils._runtime import DEBUG, early_bound, is_shutting_down, log
from torch_utils.errors import ResourceClosedError, shown

__all__ = ["Resource"]

Self = TypeVar("Self", bound="Resource")


def _references_at_the_end() -> int:
    """Count the references that a destructor sees when the last other one has gone."""
    counts: list[int] = []

    class Dropped:
        def __del__(self) -> None:
            # It runs here and now, not at the end.
            counts.append(sys.getrefcount(self))  # clean-exit-lint: ignore[global]

    Dropped()
    return counts[0]


_REFERENCES_AT_THE_END = _references_at_the_end()


_LOADS = (opmap.get("LOAD_METHOD"), opmap.get("LOAD_ATTR"))
_CALLS = (opmap.get("CALL"), opmap.get("CALL_METHOD"))
_FUNCTIONS = (opmap.get("CALL"), opmap.get("CALL_FUNCTION"))
_CACHE = opmap.get("CACHE", -1)
_RUNS_LATER = 0x20 | 0x80 | 0x200  # generator, coroutine, asynchronous generator (inspect.CO_*)
_SHIFT = 1 if sys.version_info >= (3, 12) else 0  # the lowest bit says: a method
_WINDOW = 48  # bytes, between naming a method and calling it without arguments


@early_bound
def _is_calling_del(frame: FrameType | None) -> bool:
    """Say whether a function is executing a call of ``__del__``, rather than dropping something."""
    if frame is None:
        return False
    code, at, names = frame.f_code.co_code, frame.f_lasti, frame.f_code.co_names
    while code[at] == _CACHE and at > 0:
        at -= 2
    if "__del__" in frame.f_code.co_consts and code[at] in _FUNCTIONS:
        return True  # What `getattr` returned, presumably.
    if "__del__" not in names or code[at] not in _CALLS:
        return False
    number = names.index("__del__")
    before = range(max(0, at - _WINDOW), at, 2)
    return any(code[i] in _LOADS and code[i + 1] >> _SHIFT == number for i in before)


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

    Errors out of `_release` are logged once and never raised; KeyboardInterrupt and SystemExit
    do go on to the caller, but not at exit. An interrupt that comes while this closes, at
    whichever instruction, goes on to the caller when what was begun has been brought to its end.

    Threads: any thread may close; a second one waits until the first is done, and a call from
    inside `_release` returns at once. Forks: a child's copy of its parent's resource is never
    released in the child, which may open and close resources of its own. Copying and pickling
    are refused, for two owners of one thing cannot each close it once.

    A `_release` that is a coroutine function or a generator is a TypeError in the class statement.

    Do not override ``__del__``; a subclass that must, calls this one. A framework that calls it
    closes the object, without a warning.
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
        if "__init__" in cls.__dict__:
            cls.__init__ = _mark_built(cls.__init__)  # type: ignore[method-assign]

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
        entry = Entry(id(self), cls.__name__, weakref.ref(self), cls._release, cls.close_at_exit)
        entry.built = not hasattr(cls.__init__, "_marks_built")
        REGISTRY.add(entry)
        return self

    def _release(self) -> None:
        """Give up what this object holds. Called once; see the class for when."""

    @property
    def closed(self) -> bool:
        """Whether it is closed. `_release` itself still sees it open."""
        entry = _entry_of(self)
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
        if is_shutting_down() and _in_daemon_thread():
            raise SystemExit(f"{name} is closed: the program is ending")
        raise ResourceClosedError(
            f"this {name} is closed; create a new one, or keep it open for as long as it is used"
        )

    def close(self) -> bool:
        """Release what it holds, if that has not happened yet. Idempotent.

        Returns:
            True if this call ran `_release` and it succeeded.
        """
        try:
            entry = _entry_of(self)
            return entry is not None and entry.close(self)
        except BaseException:
            # What comes out of `_release`, or an interrupt, which may have come before anything
            # was begun. Nothing happens the second time where something was.
            if entry := _entry_of(self):
                entry.close(self)
            raise

    async def aclose(self) -> bool:
        """Close from a coroutine.

        It never suspends, so it cannot be cancelled halfway.
        """
        return self.close()

    def __enter__(self: Self) -> Self:
        self.ensure_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            _close_after(self, exc)
        except BaseException:
            # If an interrupt came before the other call. Not by attributes: one that `release`
            # has emptied, which may be the block's own doing, has none.
            Resource.close(self)
            raise

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    @early_bound
    def __del__(self) -> None:
        entry = REGISTRY.get(id(self))
        if entry is None or (is_shutting_down() and not entry.at_exit):
            return
        # Frameworks call this themselves, to close what they are about to drop (Ray Serve does):
        # then it was closed on purpose. Such a caller has a reference more, or names this method.
        dropped = getrefcount(self) <= _REFERENCES_AT_THE_END or is_finalized(self)
        dropped = dropped and not _is_calling_del(_getframe(0).f_back)
        try:
            mine = "claim" not in entry.__dict__ and entry.close(self)
        except BaseException as error:
            # A destructor has no caller to tell; the registry has logged it. What the variable
            # has goes with this call, which the entry's error would keep: a Ctrl-C comes again.
            _again = again_afterwards(error)
            error.__traceback__ = None
            return
        if mine and dropped and entry.built and not is_shutting_down():
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
        else:  # Python 3.10: kept for whoever looks.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
    except Exception as failure:
        # A class of its own may refuse notes; its error must not be replaced by another.
        log(DEBUG, "no note on a %s: %r", type(error).__name__, failure)


@early_bound
def _entry_of(resource: Resource) -> Entry | None:
    return REGISTRY.get(id(resource))


def _close_after(resource: Resource, exc: BaseException | None) -> None:
    """Close it at the end of a block that may have raised."""
    entry = _entry_of(resource)
    if entry is None:
        return
    try:
        entry.close(resource)
    except BaseException as error:
        if exc is None or entry.error is not error:
            raise
        # KeyboardInterrupt out of the release: the block's own error wins.
    if exc is not None and entry.error is not None:
        add_note(exc, f"releasing {entry.name} also failed: {shown(entry.error)}")


def _in_daemon_thread() -> bool:
    threading = sys.modules.get("threading")
    return threading is not None and threading.current_thread().daemon


def _mark_built(init: Callable[..., None]) -> Callable[..., None]:
    """Let an object say that its ``__init__`` has finished.

    One whose ``__init__`` raised is still released, but without the warning: nobody ever had
    it in hand to close it.
    """

    @functools.wraps(init)
    def marking(self: Resource, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        entry = _entry_of(self)
        if entry is not None and getattr(type(self).__init__, "__wrapped__", None) is init:
            entry.built = True

    marking._marks_built = True  # type: ignore[attr-defined]
    return marking
