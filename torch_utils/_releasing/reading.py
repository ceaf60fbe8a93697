"""Look into objects without running a line of their code.

`isinstance`, `hasattr`, `len`, iteration and attributes may all be the program's own code, which a
release must not run unasked: it may be slow, count its calls, or change what it looks at. So types
are compared as they are, and the garbage collector says what an object refers to.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any


@contextmanager
def undisturbed(torch: Any) -> Iterator[None]:
    """Switch off what classes of tensors and the program's modes make of torch's functions.

    In this thread. A default device is such a mode too, and so are fake tensors.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


LEAF, TENSOR, MODULE, DICT, SEQUENCE, OTHER = range(6)

_LEAVES = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType, FrameType),
    *(GeneratorType, CoroutineType, TracebackType, weakref.ref, BaseException),
    *(str, bytes, bytearray, int, float, complex, memoryview),
)
# What belongs to everybody, and leads everywhere.
_PUBLIC = frozenset(
    ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "torch_utils")
)
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Kinds:
    """What a type is to a release, each type asked once."""

    def __init__(self, torch: Any) -> None:
        self._tensor = getattr(torch, "Tensor", ())
        self._module = getattr(getattr(torch, "nn", None), "Module", ())
        self._known: dict[type, int] = {}
        self._slots: dict[type, list[tuple[str, Any]]] = {}

    def of(self, kind: type) -> int:
        """Say what instances of a type are: LEAF (they lead nowhere), TENSOR, MODULE, ..."""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._find_out(kind)
        return known

    def _find_out(self, kind: type) -> int:
        # Both sides are types, and none of torch's asks the program: so this runs none of its code.
        if self._tensor and issubclass(kind, self._tensor):
            return TENSOR
        if self._module and issubclass(kind, self._module):
            return MODULE
        if issubclass(kind, dict):
            return DICT
        if issubclass(kind, (list, tuple, set, frozenset, deque)):
            return SEQUENCE
        if issubclass(kind, _LEAVES) or not kind.__flags__ & _MADE_IN_PYTHON:
            return LEAF
        package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
        return LEAF if package in _PUBLIC else OTHER

    def slots(self, thing: Any) -> list[tuple[str, Any]]:
        """List what an object has in ``__slots__``, by name."""
        kind = type(thing)
        known = self._slots.get(kind)
        if known is None:
            known = self._slots[kind] = slots_of(kind)
        found = []
        for name, slot in known:
            try:
                found.append((name, slot.__get__(thing)))
            except AttributeError:
                continue  # Never set.
        return found


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """List the slots of a class: their names, and what reads and deletes them."""
    if kind in _WITHOUT_SLOTS:
        return []
    slots = [
        (name, slot)
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    ]
    if not slots:
        _WITHOUT_SLOTS.add(kind)
    return slots


# A class's slots are there from its beginning. `torch.Tensor` has none among 700 other names.
_WITHOUT_SLOTS: weakref.WeakSet[type] = weakref.WeakSet()


def contents_of(thing: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``, whatever its class makes of attributes."""
    contents: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    return contents


def entries_of(mapping: Any) -> tuple[list[Any], list[Any]]:
    """List the keys and the values of a mapping: a dictionary, or one of somebody's own.

    Two flat lists, for a tuple per entry would be one more object for the garbage collector.
    """
    kind = type(mapping)
    if issubclass(kind, dict):
        return list(dict.keys(mapping)), list(dict.values(mapping))
    if mapping is None:
        return [], []
    if type.__getattribute__(kind, "__module__") == "torch.jit._script":
        # torch's own, around what a C++ object holds: nothing else can say what that is.
        pairs = list(mapping.items())
        return [name for name, _ in pairs], [value for _, value in pairs]
    return _entries_inside(mapping)


def _entries_inside(mapping: Any, levels: int = 3) -> tuple[list[Any], list[Any]]:
    """List what a foreign mapping holds, in the dictionaries and lists that it is made of."""
    names: list[Any] = []
    values: list[Any] = []
    inside = [mapping]
    for _ in range(levels):
        referents = gc.get_referents(*inside)
        inside = []
        for referent in referents:
            kind = type(referent)
            if issubclass(kind, dict):
                names.extend(dict.keys(referent))
                values.extend(dict.values(referent))
                inside.append(referent)
            elif issubclass(kind, (list, tuple, set, deque)):
                entries = gc.get_referents(referent)
                names.extend(range(len(entries)))
                values.extend(entries)
    return names, values
