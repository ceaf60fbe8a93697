"""Read foreign objects without running any of their code.

`isinstance`, `hasattr`, iteration, equality and attributes may call code of the program, which may
be slow or have side effects. So classes are compared by identity, containers are read by the
methods of the built-in classes, and attributes come from the instance's dictionary and slots.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from gc import get_referents, is_tracked
from itertools import chain
from typing import Any

_mro_of = type.__dict__["__mro__"].__get__
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__
class_contents = type.__dict__["__dict__"].__get__
"""Return the attributes that a class itself defines, as a mapping proxy."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial),
    *(staticmethod, classmethod, property),
)
SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# They lead to the whole program, or to variables of functions.
NOT_ENTERED = (type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType)
NOT_ENTERED_PACKAGES = frozenset(("logging", "threading", "_thread", "weakref", "_weakref"))
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_SHOWN_KEYS = (str, int, float, bool, bytes, type(None))
# By the ids of classes, because a metaclass may define their hash and equality.
_WITHOUT_ATTRIBUTES = frozenset(map(id, (dict, OrderedDict, *_SEQUENCES)))
_OF_PLAIN_VALUES = frozenset(map(id, (dict, OrderedDict, list, tuple, set)))


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases."""
    bases: tuple[type, ...] = _mro_of(kind)
    return bases


def name_of(kind: type) -> str:
    """Return a class's name, as a plain string."""
    return str.__str__(_name_of(kind))


def module_of(kind: type) -> str:
    """Return the name of a class's module, or an empty string."""
    name = _module_of(kind)
    return name if type(name) is str else ""


def is_among(one: object, many: Iterable[object]) -> bool:
    """Return whether ``one`` is the same object as one of ``many``."""
    for other in many:  # noqa: SIM110  (`any` and a generator take three times as long.)
        if one is other:
            return True
    return False


def is_instance(thing: Any, kind: type) -> bool:
    """Return what `isinstance` would, without reading the object's ``__class__``."""
    return type(thing) is kind or is_among(kind, bases_of(type(thing)))


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


class _NoArray:
    """Stands for numpy's class of arrays while numpy is not loaded."""


def _untracked_classes() -> frozenset[int]:
    """Return the ids of classes that hold memory although the collector does not track them."""
    packed = getattr(getattr(sys.modules.get("torch"), "_C", None), "ScriptObject", _NoArray)
    return frozenset((id(array_class()), id(packed)))


def array_class() -> Any:
    """Return numpy's class of arrays, or one without instances."""
    return getattr(sys.modules.get("numpy"), "ndarray", _NoArray)


# Attributes


def dictionary_slot(kind: type) -> Any:
    """Return the descriptor of a class's ``__dict__``, which properties cannot replace, or None."""
    for base in bases_of(kind):
        own = class_contents(base).get("__dict__")
        if type(own) is types.GetSetDescriptorType or _is_slot(own):  # Some C classes have a slot.
            return own
    return None


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the slots that a class and its bases declare."""
    declaring = [c for c in map(class_contents, bases_of(kind)) if "__slots__" in c]
    return [v for contents in declaring for v in contents.values() if _is_slot(v)]


def _is_slot(value: object) -> bool:
    return type(value) is types.MemberDescriptorType


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes in an instance's dictionary and slots."""
    own = dictionary_slot(type(thing))
    found: dict[str, Any] = {} if own is None else dict(own.__get__(thing))
    for slot in slots_of(type(thing)):
        with suppress(AttributeError):  # The slot is empty.
            found[slot.__name__] = slot.__get__(thing)
    return found


# Parts


def items_of(thing: Any) -> Iterator[tuple[Any, str]] | None:
    """Return what stands in a list, tuple, set, deque or dictionary, with labels such as "[0]".

    Of a dictionary these are the values, and the keys that are objects. What cannot lead to memory
    is left out; see `_leads_on`. None for other objects.
    """
    holders = _untracked_classes()
    if is_instance(thing, dict):
        if dict.__contains__(thing, "__builtins__"):  # Globals lead to everything.
            return iter(())
        keys, pairs = _keys_and_pairs(thing)
        values = ((v, f"[{_shown(key)}]") for key, v in pairs if _leads_on(v, holders))
        return chain(values, ((key, ".keys()") for key in keys if is_tracked(key)))
    for kind in _SEQUENCES:
        if is_instance(thing, kind):
            iterate: Callable[[Any], Iterator[Any]] = kind.__iter__
            items = enumerate(list(iterate(thing)))
            return ((item, f"[{n}]") for n, item in items if _leads_on(item, holders))
    return None


def _keys_and_pairs(thing: Any) -> tuple[list[Any], Iterable[tuple[Any, Any]]]:
    """Return copies; a list of pairs would set off garbage collections."""
    keys = list(dict.keys(thing))
    return keys, zip(keys, list(dict.values(thing)), strict=False)


def _shown(key: Any) -> str:
    return repr(key) if is_among(type(key), _SHOWN_KEYS) else f"<{name_of(type(key))}>"


def parts_of(thing: Any) -> Iterator[tuple[Any, str]]:
    """Yield what an object refers to and may lead to memory, with a label such as ".weight".

    A part is yielded once for each reference.
    """
    holders, kind = _untracked_classes(), type(thing)
    items = items_of(thing)
    attributes = {} if id(kind) in _WITHOUT_ATTRIBUTES else attributes_of(thing)
    inner: Iterable[Any] = ()
    if kind is types.FunctionType:  # Not its globals, which lead to everything.
        inner = (*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__)
    elif items is None and not attributes:
        inner = get_referents(thing)
    yield from items or ((part, "") for part in inner if _leads_on(part, holders))
    for name, part in attributes.items():
        if type(name) is not str or not _leads_on(part, holders):
            continue
        if name in _REGISTRIES and is_instance(part, dict):
            for key, child in _keys_and_pairs(part)[1]:
                yield child, f".{key}" if type(key) is str else ""
        else:
            yield part, f".{name}"


def _leads_on(part: Any, holders: frozenset[int]) -> bool:
    """Return whether an object may lead to memory.

    What the garbage collector does not track, such as a string, holds no tensor; to ask it is much
    faster than to look. ``holders`` has the exceptions.
    """
    kind = type(part)
    if id(kind) not in _OF_PLAIN_VALUES:
        return is_tracked(part) or id(kind) in holders
    inner = get_referents(part)  # One step in C, however many strings and numbers there are.
    return any(map(is_tracked, inner)) or not holders.isdisjoint(map(id, map(type, inner)))
