"""Classes, read so that no metaclass has a say.

One may define what its classes answer when they are compared, hashed, or asked for an attribute;
what C keeps of a class is there all the same. So classes are compared by identity here, and
noted by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_bases = type.__dict__["__mro__"].__get__
_module = type.__dict__["__module__"].__get__
_name = type.__dict__["__name__"].__get__
contents_of_class = type.__dict__["__dict__"].__get__
"""Return what a class itself defines, as a mapping proxy."""
flags_of = type.__dict__["__flags__"].__get__


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases."""
    bases: tuple[type, ...] = _bases(kind)
    return bases


def name_of(kind: type) -> str:
    """Return a class's name, as a plain string."""
    return str.__str__(_name(kind))


def module_of(kind: type) -> str:
    """Return the module that a class says it is from, or an empty string."""
    name = _module(kind)
    return name if type(name) is str else ""


def package_of(kind: type) -> str:
    """Return the package that a class says it is from, or an empty string."""
    return module_of(kind).partition(".")[0]


def is_among(one: object, many: Iterable[object]) -> bool:
    """Say what ``in`` would, if nothing defined what equal means."""
    return any(one is other for other in many)


def isinstance_of(thing: Any, kind: type) -> bool:
    """Say what `isinstance` would, without asking the object for its ``__class__``."""
    return is_among(kind, bases_of(type(thing)))


class ByClass(Generic[T]):
    """What is found out about classes, each asked once and kept meanwhile."""

    def __init__(self, find_out: Callable[[type], T]) -> None:
        self._find_out = find_out
        self._known: dict[int, tuple[T, type]] = {}

    def __call__(self, kind: type) -> T:
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = self._find_out(kind), kind
        return known[0]
