"""faiss indexes: destroy the C++ object behind the caller's variable, where that is safe.

A Python proxy owns its C++ index, or only points at one that something else owns. An index that
stands on another one (IndexIDMap, IndexIVF on its quantizer) keeps that one's proxy in its list
``referenced_objects``, and its bare pointer: destroying that one would make it crash.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from torch_utils._releasing.references import Frames
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import bury


class FaissTarget(Target):
    """A faiss index, of any kind."""

    _nbytes = 0

    def count(self, inventory: Inventory) -> None:
        if self.thing.thisown:
            self._nbytes = _code_bytes(self.thing)
        self._inventory = inventory

    def give_up(self, place: str) -> None:
        if self.thing.thisown:
            _refuse_in_use(self.thing, self.name)
        bury(self.thing, f"this {self.name}", place)
        if self._nbytes:
            self._inventory.add_freed("host", self._nbytes)


def is_index_class(bases: tuple[type, ...]) -> bool:
    """Say whether a class with these bases is one of faiss indexes, without importing faiss."""
    faiss = sys.modules.get("faiss")
    return faiss is not None and any(
        getattr(faiss, name, None) in bases for name in ("Index", "IndexBinary")
    )


def _code_bytes(index: Any) -> int:
    """Count the vectors as they are stored; graphs and lists around them come on top."""
    for name in ("index", "storage"):  # One that it stands on, and may own.
        inner = getattr(index, name, None)
        if inner is not None:
            return _code_bytes(inner) if getattr(index, "own_fields", False) else 0
    return int(index.ntotal) * int(getattr(index, "code_size", 0))


def _refuse_in_use(index: Any, name: str) -> None:
    """Raise if a part of the program would crash when the index went."""
    frames = Frames(__name__.partition(".")[0])
    users = {id(value) for value, _ in frames.arguments_of("faiss")}
    if id(index) in users:
        raise RuntimeError(f"this {name} is being used by another thread and was not released")
    for referrer in gc.get_referrers(index):
        if type(referrer) is list and any(map(_stands_on(referrer), gc.get_referrers(referrer))):
            raise RuntimeError(
                f"another faiss index stands on this {name}, so it was not released; release "
                "that one first, or both together with that one in front"
            )


def _stands_on(references: list[Any]) -> Callable[[Any], bool]:
    def check(owner: Any) -> bool:
        # A dictionary, or the proxy itself while Python has made no dictionary for it.
        contents = owner if type(owner) is dict else None
        if contents is None and hasattr(type(owner), "thisown"):
            contents = vars(owner)
        return contents is not None and contents.get("referenced_objects") is references

    return check
