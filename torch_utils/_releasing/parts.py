"""What an object consists of, read without running the program's code.

The items of containers are read by the methods of the built-in classes, whatever a subclass
makes of them; attributes from the instance's dictionary and slots, never through a property.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any

from torch_utils._releasing.kinds import Kind, bases_of, contents_of

Part = tuple[Any, str]

_LONGEST_NAME = 200
_SEQUENCES = (list, tuple, set, frozenset, deque)
_SHOWN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


def parts_of(thing: Any, name: str, kind: Kind) -> list[Part]:
    """List what an object of a kind consists of, each part with its name; empty for leaves."""
    if kind is Kind.MAPPING:
        return list(_of_mapping(thing, name))
    if kind is Kind.ITEMS:
        return list(_numbered(_items_of(thing), name))
    if kind is Kind.ARRAY:
        return list(_numbered(_objects_of(thing), name))
    own: list[Part] = []
    if kind is Kind.RECORD:  # A UserDict that derives from a list, say: nothing is left out.
        own = [] if not isinstance_of(thing, dict) else list(_of_mapping(thing, name))
    return own + list(_of_attributes(thing, name))


def keys_of(thing: Any, name: str) -> list[Part]:
    """List the keys of a mapping that might be more than keys."""
    items = dict.items(thing) if isinstance_of(thing, dict) else _proxied(thing)
    return [(k, _named(name, ".keys()")) for k, _ in list(items) if type(k) not in _SHOWN_KEYS]


def isinstance_of(thing: Any, kind: type) -> bool:
    """Say what `isinstance` would, without asking the object for its ``__class__``."""
    return kind in bases_of(type(thing))


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes that an instance itself has, in its dictionary and its slots."""
    found: dict[str, Any] = {}
    for base in reversed(bases_of(type(thing))):
        contents = contents_of(base)
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


def _of_attributes(thing: Any, name: str) -> Iterator[Part]:
    for attribute, value in attributes_of(thing).items():
        yield value, _named(name, f".{attribute}")


def _of_mapping(thing: Any, name: str) -> Iterator[Part]:
    items = dict.items(thing) if isinstance_of(thing, dict) else _proxied(thing)
    for key, value in list(items):
        label = repr(key) if type(key) in _SHOWN_KEYS else f"<{type(key).__name__}>"
        yield value, _named(name, f"[{label}]")


def _proxied(proxy: MappingProxyType[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Read what a mapping proxy shows, if that is a dictionary; another one runs its own code."""
    import gc

    (mapping,) = gc.get_referents(proxy)
    return dict.items(mapping) if isinstance_of(mapping, dict) else ()


def _items_of(thing: Any) -> Iterable[Any]:
    for kind in _SEQUENCES:
        if isinstance_of(thing, kind):
            return list(kind.__iter__(thing))
    return list(thing)  # A view of a dictionary: a class of C's, that nothing derives from.


def _numbered(items: Iterable[Any], name: str) -> Iterator[Part]:
    for index, value in enumerate(items):
        yield value, _named(name, f"[{index}]")


def _objects_of(array: Any) -> list[Any]:
    """List the items of an array of objects; an array of numbers has no parts."""
    numpy_array: Any
    (numpy_array,) = (b for b in bases_of(type(array)) if (b.__module__, b.__name__) == _ARRAY)
    if not numpy_array.dtype.__get__(array).hasobject:
        return []
    items: list[Any] = numpy_array.flatten(array).tolist()
    return items


_ARRAY = ("numpy", "ndarray")


def _named(name: str, label: str) -> str:
    """Name a part. In something deep, only the beginning: all the names would fill the memory."""
    if len(name) < _LONGEST_NAME:
        return name + label
    return name if name.endswith("...") else f"{name}..."
