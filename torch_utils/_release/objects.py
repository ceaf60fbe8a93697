"""Read foreign objects without running any of their code.

`isinstance`, `hasattr`, iteration, equality and attributes may call code of the program, which may
be slow or have side effects. So classes are compared by identity, containers are read by the
methods of the built-in classes, and attributes come from the instance's dictionary and slots. What
an object refers to is what it shows the garbage collector.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from gc import get_referents, is_tracked
from typing import Any

from torch_utils._runtime import private, whole_torch

bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""Return a class and its bases."""
_contents_of: Any = vars(types.ModuleType)["__dict__"].__get__
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
class_contents = type.__dict__["__dict__"].__get__
"""Return the attributes that a class itself defines, as a mapping proxy."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial),
    *(staticmethod, classmethod, property),
)
# They lead to the whole program, or to variables of functions.
_NOT_ENTERED = (type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType)
_NOT_ENTERED_PACKAGES = frozenset(("logging", "threading", "_thread", "weakref", "_weakref"))
REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
"""The dictionaries of modules whose entries are read as attributes."""
LONGEST_NAME = 200  # The names of deeply nested parts would fill the memory.
# By the ids of classes, because a metaclass may define their hash and equality.
_SHOWN_KEYS = frozenset(map(id, (str, int, float, bool, bytes, type(None))))
CONTAINERS = frozenset(map(id, (dict, OrderedDict, *_SEQUENCES)))
"""The ids of the built-in classes of containers."""
_PLAIN_CONTAINERS = frozenset(map(id, (dict, tuple)))  # The collector may not track these.


@contextmanager
def without_overrides(torch: Any) -> Iterator[None]:
    """Disable overrides of torch's functions in this thread.

    Tensor subclasses and modes, such as a default device or fake tensors, override functions.
    """
    functions = private(torch, "_C.DisableTorchFunction") or nullcontext
    dispatch = private(torch, "_C._DisableTorchDispatch") or nullcontext
    with functions(), dispatch():
        yield


def name_of(kind: type) -> str:
    """Return a class's name, as a plain string."""
    return str.__str__(_name_of(kind))


def module_of(kind: type) -> str:
    """Return the name of a class's module, or an empty string."""
    name = _module_of(kind)
    return name if type(name) is str else ""


def is_instance(thing: Any, kind: type) -> bool:
    """Return what `isinstance` would, without reading the object's ``__class__``."""
    return type(thing) is kind or id(kind) in map(id, bases_of(type(thing)))


def is_container(kind: type) -> bool:
    """Return whether objects of a class are lists, tuples, sets, deques or dictionaries."""
    return not CONTAINERS.isdisjoint(map(id, bases_of(kind)))


def is_heap_type(kind: type) -> bool:
    """Return whether a class was made by a program, so that objects can get another one."""
    return bool(_flags_of(kind) & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def find_in_class(kind: type, name: str) -> Any:
    """Return a class's attribute, unbound, or None."""
    for base in bases_of(kind):
        contents = class_contents(base)
        if name in contents:
            return contents[name]
    return None


def is_released(thing: object) -> bool:
    """Return whether an object was released, without using it."""
    return "_is_tombstone" in class_contents(type(thing))


# Attributes and items


def layout_of(kind: type) -> tuple[Any, list[types.MemberDescriptorType]]:
    """Return the descriptor of a class's ``__dict__``, or None, and those of its slots.

    Properties of the program cannot replace them.
    """
    dictionary, slots = None, []
    for contents in map(class_contents, bases_of(kind)):
        own = contents.get("__dict__")
        # Some C classes have a slot.
        if type(own) is types.GetSetDescriptorType or type(own) is types.MemberDescriptorType:
            dictionary = dictionary or own
        for value in contents.values() if "__slots__" in contents else ():
            if type(value) is types.MemberDescriptorType:
                slots.append(value)
    return dictionary, slots


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes in an instance's dictionary and slots."""
    dictionary, slots = layout_of(type(thing))
    found: dict[str, Any] = {} if dictionary is None else dict(dictionary.__get__(thing))
    for slot in slots:
        with suppress(AttributeError):  # The slot is empty.
            found[slot.__name__] = slot.__get__(thing)
    return found


def items_of(thing: Any) -> Iterator[tuple[Any, str]]:
    """Yield what stands in a list, tuple, set, deque or dictionary, with labels such as "[0]".

    Of a dictionary these are the values, and the keys that are objects.
    """
    # Copies, because others may change it. A list of pairs would set off garbage collections.
    bases = set(map(id, bases_of(type(thing))))
    for kind in _SEQUENCES:
        if id(kind) in bases:
            iterate: Callable[[Any], Iterator[Any]] = kind.__iter__
            for number, item in enumerate(list(iterate(thing))):
                yield item, f"[{number}]"
    # The globals of a module lead to everything.
    if id(dict) in bases and not is_namespace(thing):
        keys = list(dict.keys(thing))
        for key, value in zip(keys, list(dict.values(thing)), strict=False):
            yield value, label_of_key(key)
        for key in keys:
            if is_tracked(key):
                yield key, ".keys()"


def label_of_key(key: Any) -> str:
    """Return how the value of a key is named, without running code of the key."""
    return f"[{key!r}]" if id(type(key)) in _SHOWN_KEYS else f"[<{name_of(type(key))}>]"


def leads_nowhere(container: Any) -> bool:
    """Return whether a container of a built-in class is empty, or the namespace of a module."""
    return not len(container) or (type(container) is dict and is_namespace(container))


def is_namespace(thing: Any) -> bool:
    """Return whether a dictionary is that of a module, which leads to the whole program."""
    return dict.__contains__(thing, "__builtins__") or thing is builtins.__dict__


# What counts

SKIPPED, TENSOR, ARRAY, PACKED, MODULE, TRAINING, OTHER = range(7)
MEMORY = (TENSOR, PACKED, MODULE, TRAINING)
"""Kinds of objects that make their owner one that is emptied."""
# Classes whose objects refer to memory of other owners.
_TRAINING = frozenset(
    (
        *("Optimizer", "LRScheduler", "GradScaler", "AcceleratedScheduler"),
        *("DataLoader", "_BaseDataLoaderIter"),
    )
)


class Kinds:
    """How objects are counted, by their classes, and what they refer to.

    Args:
        follows_functions: Whether closures, bound methods and partial functions are followed.

    Attributes:
        untracked: The ids of classes with memory that the garbage collector does not track.
        barren: The ids of objects that lead to no memory, as `holds_memory` has found.
    """

    def __init__(self, *, follows_functions: bool = True) -> None:
        self._follows_functions = follows_functions
        self._known: dict[int, tuple[int, type]] = {}
        # A program may hide numpy from imports, but not the module that it is made of.
        names = ("numpy", "numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
        modules = [sys.modules.get(name) for name in names]
        contents = [_contents_of(module) for module in modules if type(module) is types.ModuleType]
        arrays = [each.get("ndarray") for each in contents]
        self.untracked: set[int] = {
            id(kind) for kind in (*arrays, private(whole_torch(), "_C.ScriptObject")) if kind
        }
        self._unclear = self.untracked | _PLAIN_CONTAINERS
        self._closes: dict[int, bool] = {}
        self.barren: set[int] = set()

    def of(self, kind: type) -> int:
        """Return how objects of a class are counted."""
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = _kind_of(kind, self._follows_functions), kind
        return known[0]

    def has_close(self, kind: type) -> bool:
        """Return whether a class has a method ``close``."""
        known = self._closes.get(id(kind))
        if known is None:
            self.of(kind)  # It keeps the class, and so its id.
            known = self._closes[id(kind)] = callable(find_in_class(kind, "close"))
        return known

    def may_lead_on(self, thing: Any) -> bool:
        """Return whether an object may hold memory; a string or a number does not."""
        return is_tracked(thing) or id(type(thing)) in self._unclear

    def referents(self, thing: Any) -> list[Any]:
        """Return what an object refers to and may lead to memory, once for each reference.

        The garbage collector does not track strings and numbers, which hold no tensor. It does not
        track arrays either, nor dictionaries and tuples of them, but these do.
        """
        inner = get_referents(thing)
        found = list(filter(is_tracked, inner))
        if len(found) < len(inner) and not self._unclear.isdisjoint(map(id, map(type, inner))):
            for part in inner:
                kind = id(type(part))
                if kind in self.untracked or (
                    kind in _PLAIN_CONTAINERS
                    and not is_tracked(part)
                    and not self._unclear.isdisjoint(map(id, map(type, get_referents(part))))
                ):
                    found.append(part)
        return found


def _kind_of(kind: type, follows_functions: bool) -> int:
    torch, bases = whole_torch(), set(map(id, bases_of(kind)))
    if name_of(kind) in ("ScriptObject", "RecursiveScriptModule"):  # Weights in C++.
        return PACKED
    if torch is not None and id(torch.Tensor) in bases:
        return TENSOR
    if torch is not None and id(torch.nn.Module) in bases:
        return MODULE
    is_entered = "_is_tombstone" not in class_contents(kind)
    for base in bases_of(kind):
        package, name = module_of(base).partition(".")[0], name_of(base)
        if package == "numpy" and name == "ndarray":
            return ARRAY
        if package in ("torch", "accelerate") and name in _TRAINING:
            return TRAINING
        is_entered = is_entered and package not in _NOT_ENTERED_PACKAGES
    not_entered = _NOT_ENTERED if follows_functions else (*_NOT_ENTERED, *FUNCTIONS)
    return OTHER if is_entered and bases.isdisjoint(map(id, not_entered)) else SKIPPED
