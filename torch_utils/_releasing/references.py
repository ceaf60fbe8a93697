"""References: where the program's variables are, and where an object leads to.

Like `gc.get_referents`, but by name, and a bounded number at a time.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

Reference = tuple[Any, str]  # an object, and what reports call whoever refers to it

# What leads nowhere, or everywhere.
LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...)}
    | {type, ModuleType, CodeType, BuiltinFunctionType, type(int.__add__), type(str.join)}
)
_MOST = 10_000  # entries of one container that are looked at
_SNAPSHOT_REFERENCES = 3  # the frame's, ours, and the argument of getrefcount


class Frames:
    """The frames of all threads, without those of one package.

    Reading a function's variables makes Python below 3.13 keep a copy of them with the frame,
    and so everything that they refer to, until the function ends. So the copies that nobody
    else uses are emptied in the end.
    """

    def __init__(self, without_package: str) -> None:
        self._package = without_package
        self._frames: list[FrameType] = []
        self._snapshots: list[dict[str, Any]] = []

    def __enter__(self) -> Frames:
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                module = frame.f_globals.get("__name__") or ""
                if module.partition(".")[0] != self._package:
                    self._frames.append(frame)
                frame = frame.f_back
        return self

    def __exit__(self, *exception: object) -> None:
        while self._snapshots:
            snapshot = self._snapshots.pop()
            if sys.getrefcount(snapshot) <= _SNAPSHOT_REFERENCES:
                snapshot.clear()
        self._frames.clear()

    def variables(self) -> Iterator[Reference]:
        """Yield the values of the functions' variables."""
        for frame in self._frames:
            if frame.f_code.co_flags & CO_OPTIMIZED:
                yield from self._read(frame, "the variable {!r} of {}()")

    def arguments_of(self, package: str) -> Iterator[Reference]:
        """Yield the values of the variables of one package's functions."""
        for frame in self._frames:
            if (frame.f_globals.get("__name__") or "").partition(".")[0] == package:
                yield from self._read(frame, "the variable {!r} of {}()")

    def globals(self) -> Iterator[Reference]:
        """Yield the values of the global variables of the modules that are running."""
        seen: set[int] = set()
        for frame in self._frames:
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield from _globals(frame.f_globals)
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        yield last, "sys.last_value"

    def _read(self, frame: FrameType, name: str) -> Iterator[Reference]:
        variables = frame.f_locals
        if type(variables) is dict:
            self._snapshots.append(variables)
        for variable, value in list(variables.items()):
            yield value, name.format(variable, frame.f_code.co_name)


def globals_of_all_modules() -> Iterator[Reference]:
    """Yield the values of the global variables of every module."""
    for module in list(sys.modules.values()):
        if type(module) is ModuleType:
            yield from _globals(vars(module))


def _globals(variables: dict[str, Any]) -> Iterator[Reference]:
    module = variables.get("__name__")
    for variable, value in list(variables.items()):
        if not variable.startswith("__"):
            yield value, f"the variable {variable!r} of module {module}"


def follow(thing: Any, kind: type, holder: str) -> Iterator[Reference]:
    """Yield what an object refers to, each with the name of its holder."""
    if issubclass(kind, dict):
        yield from ((value, holder) for value in islice(dict.values(thing), _MOST))
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        yield from ((value, holder) for value in islice(thing, _MOST))
    elif issubclass(kind, BaseException):
        yield from _of_exception(thing, holder)
    elif issubclass(kind, TracebackType):
        yield from _of_traceback(thing)
    elif issubclass(kind, FrameType):
        yield from _of_frame(thing)
    elif issubclass(kind, (GeneratorType, CoroutineType)):
        for referent in gc.get_referents(thing):  # Its frame would not tell what it refers to.
            yield referent, f"the suspended {thing.__qualname__}()"
    elif issubclass(kind, FunctionType):
        for cell in thing.__closure__ or ():
            yield cell, f"a closure ({thing.__qualname__})"
        yield from ((value, f"a default of {thing.__qualname__}()") for value in _defaults(thing))
        yield thing.__dict__, holder
    elif issubclass(kind, CellType):
        yield thing.cell_contents, holder
    elif issubclass(kind, MethodType):
        yield thing.__self__, holder
    elif issubclass(kind, type):
        yield from _of_class(thing)
    else:
        yield from _of_instance(thing, kind, holder)


def _defaults(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _of_exception(error: BaseException, holder: str) -> Iterator[Reference]:
    for part in (error.__traceback__, error.__cause__, error.__context__, error.args):
        yield part, holder
    yield getattr(error, "exceptions", None), holder
    yield error.__dict__, holder


def _of_traceback(traceback: TracebackType) -> Iterator[Reference]:
    entry: TracebackType | None = traceback
    while entry is not None:
        yield from _of_frame(entry.tb_frame)
        entry = entry.tb_next


def _of_frame(frame: FrameType) -> Iterator[Reference]:
    """Yield the variables of a frame that has ended; those of running ones are roots."""
    holder = f"a frame of {frame.f_code.co_name}() that an exception keeps"
    # Its code, globals, builtins and caller are referents as well, and lead to everything.
    rest = (frame.f_globals, frame.f_builtins, frame.f_back)
    for referent in gc.get_referents(frame):
        if not any(referent is other for other in rest):
            yield referent, holder


def _of_class(kind: type) -> Iterator[Reference]:
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") and type(value) is not FunctionType:
            yield value, f"the attribute {name!r} of class {kind.__name__}"


def _of_instance(thing: Any, kind: type, holder: str) -> Iterator[Reference]:
    if not gc.is_tracked(thing):
        return
    name = holder if holder.startswith(("another module", "an optimizer")) else ""
    for referent in islice(gc.get_referents(thing), _MOST):
        if referent is not kind:
            yield referent, name or f"{_article(kind.__name__)} {kind.__name__}"


def _article(noun: str) -> str:
    return "an" if noun[:1].lower() in "aeiou" else "a"
