"""References: where the program's variables are, and where an object leads to.

Like `gc.get_referents`, but by name, and a bounded number at a time. Nothing here runs code of
the program or changes what it has: no iteration, hash, comparison, attribute or representation
that a class of the program could define. What only such code could tell is not found.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import (
    AsyncGeneratorType,
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

from torch_utils._frames import variables_of
from torch_utils._releasing.classes import contents_of_class, name_of

Reference = tuple[Any, str]  # an object, and what reports call whoever refers to it

# What leads nowhere, or everywhere: by identity, for a class may define how it is hashed.
LEAVES = frozenset(
    map(
        id,
        (
            *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
            *(type(...), type, ModuleType, CodeType, BuiltinFunctionType),
            *(type(int.__add__), type(str.join)),
        ),
    )
)
_MOST = 10_000  # entries of one container that are looked at
_NAMED = ("another module", "an optimizer")  # holders whose name covers what they consist of
_TRANSPARENT = (CellType, MethodType, BaseException)  # whoever refers to one is the holder
_SUSPENDABLE = (GeneratorType, CoroutineType, AsyncGeneratorType)
# How to iterate over a container, and over an instance of a subclass without asking that.
_CONTAINERS: tuple[tuple[Any, Any], ...] = (
    (dict, dict.values),
    *((kind, kind.__iter__) for kind in (list, tuple, set, frozenset, deque)),
)


def contents_of_module(name: str) -> dict[str, Any]:
    """Return the variables of a module that is loaded; empty for one that is lazy or missing."""
    module = sys.modules.get(name)
    return vars(module) if type(module) is ModuleType else {}


class Frames:
    """The frames of all threads, without those of one package."""

    def __init__(self, without_package: str) -> None:
        self._frames: list[FrameType] = []
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                module = dict.get(frame.f_globals, "__name__")
                if type(module) is not str or module.partition(".")[0] != without_package:
                    self._frames.append(frame)
                frame = frame.f_back

    def variables(self) -> Iterator[Reference]:
        """Yield the values of the functions' variables."""
        for frame in self._frames:
            # A name, like any string that the program can set, may be of a class of its own.
            function = str.__str__(frame.f_code.co_name)
            for name, value in variables_of(frame):
                yield value, f"the variable {str.__str__(name)!r} of {function}()"

    def arguments_of(self, package: str) -> Iterator[Reference]:
        """Yield the values of the variables of one package's functions.

        Those of a library, not the program's: where they can be had only as a copy that stays
        with the frame, they are had so.
        """
        for frame in self._frames:
            module = dict.get(frame.f_globals, "__name__")
            if type(module) is str and module.partition(".")[0] == package:
                for name, value in variables_of(frame) or list(frame.f_locals.items()):
                    yield value, f"the variable {name!r} of {frame.f_code.co_name}()"

    def globals(self) -> Iterator[Reference]:
        """Yield the values of the global variables of the modules that are running."""
        seen: set[int] = set()
        for frame in self._frames:
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield from _globals(frame.f_globals)
        yield vars(sys).get("last_exc") or vars(sys).get("last_value"), "sys.last_value"


def globals_of_all_modules() -> Iterator[Reference]:
    """Yield the values of the global variables of every module."""
    for module in list(sys.modules.values()):
        if type(module) is ModuleType:
            yield from _globals(vars(module))


def _globals(variables: dict[str, Any]) -> Iterator[Reference]:
    module = dict.get(variables, "__name__")
    where = f"module {module}" if type(module) is str else "a module"
    for variable, value in list(dict.items(variables)):
        if type(variable) is str and not variable.startswith("__"):
            yield value, f"the variable {variable!r} of {where}"


def follow(thing: Any, kind: type, holder: str) -> Iterator[Reference]:
    """Yield what an object refers to, each with the name of its holder."""
    # `issubclass` of the exact type asks nobody: the second argument is never the program's.
    for base, iterate in _CONTAINERS:
        if issubclass(kind, base):
            yield from _of_container(thing, kind, holder, base, iterate)
            return
    if issubclass(kind, TracebackType):
        yield from _of_traceback(thing)
    elif issubclass(kind, FrameType):
        yield from _of_frame(thing, _ended(thing))
    elif issubclass(kind, _SUSPENDABLE):
        yield from _of_suspended(thing)
    elif issubclass(kind, FunctionType):
        yield from _of_function(thing, holder)
    elif issubclass(kind, type):
        yield from _of_class(thing)
    else:
        yield from _of_instance(thing, kind, holder)


def _of_container(
    thing: Any, kind: type, holder: str, base: Any, iterate: Any
) -> Iterator[Reference]:
    # A subclass has attributes too; but what leads to all entries is not bounded.
    if kind is not base and base.__len__(thing) <= _MOST:
        entries = [referent for referent in gc.get_referents(thing) if referent is not kind]
    else:
        entries = list(islice(iterate(thing), _MOST))
    yield from ((entry, holder) for entry in entries)


def _of_function(function: FunctionType, holder: str) -> Iterator[Reference]:
    name = str.__str__(function.__qualname__)
    for cell in function.__closure__ or ():
        yield cell, f"a closure ({name})"
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((value, f"a default of {name}()") for value in defaults)
    yield function.__dict__, holder


def _of_suspended(generator: Any) -> Iterator[Reference]:
    name = f"the suspended {str.__str__(generator.__qualname__)}()"
    for referent in gc.get_referents(generator):
        if type(referent) is FrameType:  # Before Python 3.11 the generator has it apart.
            yield from _of_frame(referent, name)
        else:
            yield referent, name


def _of_traceback(traceback: TracebackType) -> Iterator[Reference]:
    entry: TracebackType | None = traceback
    while entry is not None:
        yield from _of_frame(entry.tb_frame, _ended(entry.tb_frame))
        entry = entry.tb_next


def _ended(frame: FrameType) -> str:
    return f"a frame of {str.__str__(frame.f_code.co_name)}() that an exception keeps"


def _of_frame(frame: FrameType, holder: str) -> Iterator[Reference]:
    """Yield the variables of a frame that has ended; those of running ones are roots."""
    # Its code, globals, builtins and caller are referents as well, and lead to everything.
    rest = (frame.f_globals, frame.f_builtins, frame.f_back)
    for referent in gc.get_referents(frame):
        if not any(referent is other for other in rest):
            yield referent, holder


def _of_class(kind: type) -> Iterator[Reference]:
    for name, value in list(contents_of_class(kind).items()):
        if type(name) is str and not name.startswith("__") and type(value) is not FunctionType:
            yield value, f"the attribute {name!r} of class {name_of(kind)}"


def _of_instance(thing: Any, kind: type, holder: str) -> Iterator[Reference]:
    if not gc.is_tracked(thing):
        return
    name = holder
    if not issubclass(kind, _TRANSPARENT) and not holder.startswith(_NAMED):
        name = f"{_article(name_of(kind))} {name_of(kind)}"
    for referent in islice(gc.get_referents(thing), _MOST):
        if referent is not kind:
            yield referent, name


def _article(noun: str) -> str:
    return "an" if noun[:1].lower() in "aeiou" else "a"
