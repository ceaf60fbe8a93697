"""Look into objects without running a line of their code.

`isinstance`, `hasattr`, `len`, iteration and attributes may all be the program's own code, which a
release must not run unasked: it may be slow, count its calls, or change what it looks at. So types
are compared as they are, and the garbage collector says what an object refers to.

What classes of tensors and the program's modes (a default device, fake tensors) make of torch's
functions is switched off meanwhile, in this thread. The with statements name torch's own two guards
for that: a context manager written in Python can be interrupted in its ``__enter__`` or before its
``__exit__``, and would leave them switched off for good.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from functools import partial
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

from torch_utils._releasing.classes import (
    ByClass,
    bases_of,
    contents_of_class,
    flags_of,
    module_of,
    package_of,
)

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
        tensor = getattr(torch, "Tensor", ())
        module = getattr(getattr(torch, "nn", None), "Module", ())
        # No method of this object: that circle would keep the program's classes.
        self.of = ByClass(partial(_find_out, tensor, module))
        """Say what instances of a type are: LEAF (they lead nowhere), TENSOR, MODULE, ..."""
        self._slots = ByClass(slots_of)

    def slots(self, thing: Any) -> list[tuple[str, Any]]:
        """List what an object has in ``__slots__``, by name."""
        found = []
        for name, slot in self._slots(type(thing)):
            try:
                found.append((name, slot.__get__(thing)))
            except AttributeError:
                continue  # Never set.
        return found


def _find_out(tensor: Any, module: Any, kind: type) -> int:
    # Both sides are types, and none of torch's asks the program: so this runs none of its code.
    if tensor and issubclass(kind, tensor):
        return TENSOR
    if module and issubclass(kind, module):
        return MODULE
    if issubclass(kind, dict):
        return DICT
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return SEQUENCE
    if issubclass(kind, _LEAVES) or not flags_of(kind) & _MADE_IN_PYTHON:
        return LEAF
    return LEAF if package_of(kind) in _PUBLIC else OTHER


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """List the slots of a class: their names, and what reads and deletes them."""
    if _WITHOUT_SLOTS.get(id(kind)) is kind:
        return []
    slots = [
        (name, slot)
        for base in bases_of(kind)
        for name, slot in contents_of_class(base).items()
        if type(slot) is MemberDescriptorType
    ]
    if not slots:
        _WITHOUT_SLOTS[id(kind)] = kind
    return slots


# A class's slots are there from its beginning. `torch.Tensor` has none among 700 other names.
_WITHOUT_SLOTS: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


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
    if module_of(kind) == "torch.jit._script":
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
