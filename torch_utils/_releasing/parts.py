"""What an object consists of, read without running the program's code.

The items of containers are read by the methods of the built-in classes, whatever a subclass
makes of them; attributes from the instance's dictionary and slots, never through a property.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any

from torch_utils._releasing.classes import (
    bases_of,
    contents_of_class,
    isinstance_of,
    module_of,
    name_of,
)
from torch_utils._releasing.kinds import Kind

Part = tuple[Any, str]
Parts = tuple[list[Any], list[str]]
"""What something consists of, and the names of that: flat lists, for there may be thousands."""

_LONGEST_NAME = 200
_SEQUENCES = (list, tuple, set, frozenset, deque)
_SHOWN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


def parts_of(thing: Any, name: str, kind: Kind) -> Parts:
    """List what an object of a kind consists of, each part with its name; empty for leaves."""
    if kind is Kind.MAPPING:
        return _of_mapping(thing, name)
    if kind is Kind.ITEMS:
        return _numbered(_items_of(thing), name)
    if kind is Kind.ARRAY:
        return _numbered(_objects_of(thing), name)
    values, names = _of_attributes(thing, name)
    if kind is Kind.RECORD and isinstance_of(thing, dict):
        # A UserDict that derives from a list, say: nothing is left out.
        own, their_names = _of_mapping(thing, name)
        return own + values, their_names + names
    return values, names


def keys_of(thing: Any, name: str) -> list[Part]:
    """List the keys of a mapping that might be more than keys."""
    items = dict.items(thing) if isinstance_of(thing, dict) else _proxied(thing)
    (named,) = _named(name, [".keys()"])
    return [(key, named) for key, _ in list(items) if type(key) not in _SHOWN_KEYS]


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes that an instance itself has, in its dictionary and its slots."""
    found: dict[str, Any] = {}
    for base in reversed(bases_of(type(thing))):
        contents = contents_of_class(base)
        slots = [v for v in contents.values() if type(v) is MemberDescriptorType]
        for slot in slots:
            try:
                found[slot.__name__] = slot.__get__(thing)
            except AttributeError:
                continue  # It is empty.
        found.update(found.pop("__dict__", {}))  # Some classes of C's have it as a slot.
        if type(contents.get("__dict__")) is GetSetDescriptorType:
            found.update(contents["__dict__"].__get__(thing))
    return found


def _of_attributes(thing: Any, name: str) -> Parts:
    attributes = attributes_of(thing)
    return list(attributes.values()), _named(name, [f".{attribute}" for attribute in attributes])


def _of_mapping(thing: Any, name: str) -> Parts:
    items = list(dict.items(thing) if isinstance_of(thing, dict) else _proxied(thing))
    labels = [
        f"[{repr(key) if type(key) in _SHOWN_KEYS else f'<{name_of(type(key))}>'}]"
        for key, _ in items
    ]
    return [value for _, value in items], _named(name, labels)


def _proxied(proxy: MappingProxyType[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Read what a mapping proxy shows, if that is a dictionary; another one runs its own code."""
    import gc

    (mapping,) = gc.get_referents(proxy)
    return dict.items(mapping) if isinstance_of(mapping, dict) else ()


def _items_of(thing: Any) -> list[Any]:
    for kind in _SEQUENCES:
        if isinstance_of(thing, kind):
            return list(kind.__iter__(thing))
    return list(thing)  # A view of a dictionary: a class of C's, that nothing derives from.


def _numbered(values: list[Any], name: str) -> Parts:
    return values, _named(name, [f"[{index}]" for index in range(len(values))])


def _objects_of(array: Any) -> list[Any]:
    """List the items of an array of objects; an array of numbers has no parts."""
    numpy_array: Any
    (numpy_array,) = (b for b in bases_of(type(array)) if (module_of(b), name_of(b)) == _ARRAY)
    if not numpy_array.dtype.__get__(array).hasobject:
        return []
    # A view of the base class tells no subclass of it, and its copy does not either.
    items: list[Any] = numpy_array.view(array, numpy_array).flatten().tolist()
    return items


_ARRAY = ("numpy", "ndarray")


def _named(name: str, labels: list[str]) -> list[str]:
    """Name parts. In something deep, only the beginning: all the names would fill the memory."""
    if len(name) < _LONGEST_NAME:
        return [name + label for label in labels]
    return [name if name.endswith("...") else f"{name}..."] * len(labels)
