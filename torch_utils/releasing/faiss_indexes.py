"""Release faiss indexes: destroy the C++ object behind the caller's variable if that is safe.

A Python proxy owns its C++ index or points at one with another owner. An index that wraps another
one (IndexIDMap, IndexIVF with its quantizer) keeps the inner proxy in its list
``referenced_objects`` and uses the bare pointer. Destroying the inner index would make it crash.
"""

from __future__ import annotations

import gc
import sys
from _thread import get_ident
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from torch_utils.releasing.modules import bury
from torch_utils.releasing.objects import (
    bases_of,
    contents_of,
    is_among,
    is_index_class,
)
from torch_utils.releasing.storages import Inventory, Target


class FaissTarget(Target):
    """A faiss index of any kind.

    Its proxy becomes a tombstone first, so that no thread can start to use it. Then the C++ object
    is destroyed. If another thread or another index is using it, the proxy is restored instead.
    """

    _nbytes = 0
    _parts: Sequence[tuple[ReferenceType[Any], int]] = ()

    def count(self, inventory: Inventory) -> None:
        self._inventory = inventory
        inventory.is_partial = True  # the graphs and lists around the vectors
        self._nbytes = _code_bytes(self.thing) if self.thing.thisown else 0
        self._parts = list(_parts_of(self.thing)) if self.thing.thisown else []

    def give_up(self, place: str, trash: list[Any]) -> None:
        index = self.thing
        kind, contents = type(index), dict(contents_of(index))
        proxied = contents.get("this")
        bury(index, f"this {self.name}", place, [])
        if proxied is None or not proxied.own():
            return
        reason = _reason_to_keep(index, self.name)
        if reason:
            # In this order, other threads see either the tombstone or the whole index.
            left = contents_of(index)
            left.update(contents)
            object.__setattr__(index, "__class__", kind)
            for key in left.keys() - contents.keys():
                left.pop(key)
            raise RuntimeError(reason)
        del proxied
        contents.clear()
        self._nbytes += sum(nbytes for part, nbytes in self._parts if part() is None)
        if self._nbytes:
            self._inventory.add_freed("host", self._nbytes)


def _code_bytes(index: Any) -> int:
    """Return the bytes of the stored vectors, without the graphs and lists around them."""
    for name in ("index", "storage"):  # An inner index, which it may own.
        inner = getattr(index, name, None)
        if inner is not None:
            return _code_bytes(_downcast(inner)) if getattr(index, "own_fields", False) else 0
    size = getattr(index, "code_size", None)
    try:
        size = index.sa_code_size() if size is None else size
    except (AttributeError, RuntimeError):  # It has no code size.
        return 0
    return int(index.ntotal) * int(size)


def _downcast(index: Any) -> Any:
    """Return a proxy of the index's real class; a field returns one of the base class."""
    name = "downcast_IndexBinary" if hasattr(index, "code_size") else "downcast_index"
    downcast = getattr(sys.modules.get("faiss"), name, None)
    return index if downcast is None else downcast(index)


def _parts_of(index: Any) -> Iterator[tuple[ReferenceType[Any], int]]:
    """Yield the inner indexes that Python owns, which may be destroyed with the outer one."""
    for part in contents_of(index).get("referenced_objects", ()):
        if is_index_class(bases_of(type(part))) and part.thisown:
            yield ref(part), _code_bytes(part)
            yield from _parts_of(part)


def _reason_to_keep(index: Any, name: str) -> str:
    if is_among(index, _arguments_in_faiss()):
        return f"another thread is using this {name}, so it was not released; release it later"
    lists = [r for r in gc.get_referrers(index) if type(r) is list]
    if lists and any(_refers_from(owner, lists) for owner in gc.get_referrers(*lists)):
        return (
            f"another faiss index uses this {name}, so it was not released; release the other "
            "index first, or pass both in that order"
        )
    return ""


def _arguments_in_faiss() -> Iterator[Any]:
    """Yield the variables of faiss's functions that run in other threads."""
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = None if thread == get_ident() else top
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if type(name) is str and name.partition(".")[0] == "faiss":
                for value in list(frame.f_locals.values()):
                    yield value
                    if type(value) in (tuple, list, dict):  # ``*args``
                        yield from gc.get_referents(value)
            frame = frame.f_back


def _refers_from(owner: Any, lists: list[Any]) -> bool:
    """Return whether one of the lists is the owner's ``referenced_objects``."""
    # The owner is a dictionary, or a proxy that has no dictionary of its own yet.
    contents = owner
    if type(owner) is not dict:
        try:
            contents = contents_of(owner)
        except AttributeError:
            return False
    found = dict.get(contents, "referenced_objects") if type(contents) is dict else None
    return is_among(found, lists)
