"""faiss indexes: destroy the C++ object behind the caller's variable, where that is safe.

A Python proxy owns its C++ index, or only points at one that something else owns. An index that
stands on another one (IndexIDMap, IndexIVF on its quantizer) keeps that one's proxy in its list
``referenced_objects``, and its bare pointer: destroying that one would make it crash.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

from torch_utils._releasing.classes import bases_of, is_among
from torch_utils._releasing.reading import contents_of
from torch_utils._releasing.references import Frames
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import bury


class FaissTarget(Target):
    """A faiss index, of any kind.

    Its proxy becomes a tombstone first, so that nobody can get in any more; then it is looked
    whether somebody is inside, and only if not, the C++ object goes. Else the proxy is made whole
    again.
    """

    _nbytes = 0
    _parts: Sequence[tuple[ReferenceType[Any], int]] = ()
    _kind: type | None = None

    def count(self, inventory: Inventory) -> None:
        if self.thing.thisown:
            self._nbytes = _code_bytes(self.thing)
            self._parts = _below(self.thing)
        self._inventory = inventory

    def give_up(self, place: str) -> None:
        index = self.thing
        if self._kind is None:
            if self._is_owner():
                _refuse_in_use(index, self.name)  # Spares others an error in the meantime.
            # Kept with the target: interrupted, this is called again, and goes on from here.
            self._held = dict(contents_of(index))
            self._kind = type(index)
        bury(index, f"this {self.name}", place)
        try:
            if self._held and self._held["this"].own():
                _refuse_stood_on(index, self.name)
                _refuse_in_use(index, self.name)
        except RuntimeError:
            self._make_whole()
            raise
        self._held.clear()
        self._nbytes += sum(nbytes for part, nbytes in self._parts if part() is None)
        self._parts = ()
        if self._nbytes:
            self._inventory.add_freed("host", self._nbytes)
            self._nbytes = 0

    def _is_owner(self) -> bool:
        proxied = contents_of(self.thing).get("this")
        return proxied is not None and bool(proxied.own())

    def _make_whole(self) -> None:
        contents = contents_of(self.thing)
        contents.update(self._held)
        object.__setattr__(self.thing, "__class__", self._kind)
        for key in contents.keys() - self._held.keys():
            contents.pop(key, None)
        self._kind = None


def is_index_class(bases: tuple[type, ...]) -> bool:
    """Say whether a class with these bases is one of faiss indexes, without importing faiss."""
    faiss = sys.modules.get("faiss")
    return faiss is not None and any(
        is_among(getattr(faiss, name, None), bases) for name in ("Index", "IndexBinary")
    )


def _code_bytes(index: Any) -> int:
    """Count the vectors as they are stored; graphs and lists around them come on top."""
    for name in ("index", "storage"):  # One that it stands on, and may own.
        inner = getattr(index, name, None)
        if inner is not None:
            return _code_bytes(_exactly(inner)) if getattr(index, "own_fields", False) else 0
    size = getattr(index, "code_size", None)
    try:
        size = index.sa_code_size() if size is None else size
    except (AttributeError, RuntimeError):  # It has none, and says so.
        return 0
    return int(index.ntotal) * int(size)


def _exactly(index: Any) -> Any:
    """Return a proxy of the class that an index really is of; what a field returns is of none."""
    name = "downcast_IndexBinary" if hasattr(index, "code_size") else "downcast_index"
    downcast = getattr(sys.modules.get("faiss"), name, None)
    return index if downcast is None else downcast(index)


def _below(index: Any) -> list[tuple[ReferenceType[Any], int]]:
    """List the indexes that only an index made in Python keeps, and that may go with it."""
    found = []
    pending = [index]
    while pending:
        for part in contents_of(pending.pop()).get("referenced_objects", ()):
            if is_index_class(bases_of(type(part))) and part.thisown:
                found.append((ref(part), _code_bytes(part)))
                pending.append(part)
    return found


def _refuse_in_use(index: Any, name: str) -> None:
    """Raise if a thread is in a function of faiss with this index."""
    variables = [value for value, _ in Frames(__name__.partition(".")[0]).arguments_of("faiss")]
    if _is_among(index, variables):
        raise RuntimeError(f"this {name} is being used by another thread and was not released")


def _is_among(index: Any, variables: list[Any]) -> bool:
    """Whether one of the variables is the index, or has it among its items (``*args``)."""
    items = [i for v in variables if type(v) in (tuple, list, dict) for i in gc.get_referents(v)]
    return any(value is index for value in (*variables, *items))


def _refuse_stood_on(index: Any, name: str) -> None:
    """Raise if another index has a bare pointer to this one."""
    lists = [r for r in gc.get_referrers(index) if type(r) is list]
    if lists and any(_refers_from(owner, lists) for owner in gc.get_referrers(*lists)):
        raise RuntimeError(
            f"another faiss index stands on this {name}, so it was not released; release "
            "that one first, or both together with that one in front"
        )


def _refers_from(owner: Any, lists: list[Any]) -> bool:
    """Whether one of the lists is an index's ``referenced_objects``."""
    # A dictionary, or the proxy itself while Python has made no dictionary for it.
    contents = owner
    if type(owner) is not dict:
        try:
            contents = contents_of(owner)
        except AttributeError:
            return False
    found = dict.get(contents, "referenced_objects") if type(contents) is dict else None
    return any(found is candidate for candidate in lists)
