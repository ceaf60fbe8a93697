"""What is left of a released object: its name, and one clear error for every further use."""

from __future__ import annotations

import sys
from types import FrameType, MemberDescriptorType
from typing import Any, NoReturn

from torch_utils.errors import ReleasedError

_PACKAGE = __name__.partition(".")[0]


class Tombstone:
    """The class that a released object has afterwards.

    The object stays the same object, empty; `isinstance` still says what it was, so that code
    that checks before it calls gets to the error that explains.
    """

    _is_tombstone = True

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, "_released_class")
        if name == "__dict__":  # Or a `Module.__getattr__` under way would find nothing in it.
            return refuse(self, name)
        if name.startswith("__") and name.endswith("__") and hasattr(Tombstone, name):
            return object.__getattribute__(self, name)
        return refuse(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        refuse(self, name)

    def __delattr__(self, name: str) -> None:
        refuse(self, name)

    def __repr__(self) -> str:
        return f"<released {object.__getattribute__(self, '_released_name')}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "pickle")

    def __del__(self) -> None:
        """Keep the destructor of the former class from running on what is empty."""


def _refusing(name: str) -> Any:
    def method(self: Tombstone, *args: object, **kwargs: object) -> NoReturn:
        refuse(self, name)

    method.__name__ = name
    return method


for _name in (
    *("__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__"),
    *("__contains__", "__bool__", "__copy__", "__deepcopy__", "__enter__", "__exit__"),
    *("__add__", "__iadd__", "__mul__", "__imul__", "__matmul__", "__dir__"),
):
    setattr(Tombstone, _name, _refusing(_name))


def refuse(tombstone: Tombstone, use: str) -> NoReturn:
    """Raise the error of a released object."""
    name = object.__getattribute__(tombstone, "_released_name")
    place = object.__getattribute__(tombstone, "_released_at")
    # Chained to nothing: what led here is the program's own traceback.
    raise ReleasedError(
        f"{name} was released {place} and its weights are gone, so {use!r} cannot be used; "
        "load it again, or release it after its last use"
    ) from None


def is_released(thing: object) -> bool:
    """Say whether an object was released, without using it."""
    return "_is_tombstone" in type(thing).__dict__


def bury(thing: Any, name: str, place: str) -> None:
    """Make an object a tombstone, and empty it.

    In this order: a thread that is using the object meets the tombstone, never half an object.
    Everything that its dictionary held is dropped, cycles through it included. What others
    refer to as well (a weight shared with a live model) is untouched. Done twice, or again after
    it was interrupted anywhere, it comes to the same; of two threads the first has its say.
    """
    contents = object.__getattribute__(thing, "__dict__")
    former = contents.setdefault("_released_class", type(thing))
    contents.setdefault("_released_name", name)
    contents.setdefault("_released_at", place)
    if not is_released(thing):
        try:
            object.__setattr__(thing, "__class__", Tombstone)
        except TypeError:
            object.__setattr__(thing, "__class__", _heir_of(former))
    if type(thing) is not Tombstone:
        _empty_slots(thing, former)
    epitaph = {key: contents[key] for key in _EPITAPH if key in contents}
    if len(contents) > len(epitaph):
        # Another dictionary at once, for a thread that reads the name in the meantime.
        object.__setattr__(thing, "__dict__", epitaph)
        contents.clear()  # Somebody may have the old one.


_EPITAPH = ("_released_class", "_released_name", "_released_at", "_released_by")


def _empty_slots(thing: Any, former: type) -> None:
    for kind in former.__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType:
                try:
                    slot.__delete__(thing)
                except AttributeError:
                    continue  # It is empty.


_HEIRS: dict[type, type] = {}


def _heir_of(former: type) -> type:
    """Make a tombstone that derives from a class whose instances have a layout of their own.

    Those with __slots__, and those whose first base is an ABC.
    """
    if former not in _HEIRS:
        namespace = {
            k: v for k, v in vars(Tombstone).items() if k not in ("__dict__", "__weakref__")
        }
        namespace["__slots__"] = ()
        _HEIRS[former] = type(former)(former.__name__, (former,), namespace)
    return _HEIRS[former]


def caller(_package: str = _PACKAGE) -> str:
    """Say where the program asked for the release: the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in (_package, "contextlib"):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return "by torch_utils"
