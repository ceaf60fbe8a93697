"""Let go of what the attributes of an ordinary object hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import Any

from torch_utils._runtime import whole_torch
from torch_utils.releasing.modules import stand_in
from torch_utils.releasing.objects import (
    CONTAINERS,
    TARGETS,
    Kind,
    Kinds,
    attributes_of,
    contents_of,
    is_instance,
    name_of,
    parts_of,
    slots_of,
)
from torch_utils.releasing.storages import Target
from torch_utils.releasing.tensors import nothing_like

_LEVELS = 8  # of nested containers
_REBUILT = frozenset((list, tuple, dict, OrderedDict))
_PLAIN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


class HolderTarget(Target):
    """An object that holds models or tensors in attributes.

    Its models are targets of their own. In an attribute, also in containers, a tensor is replaced
    by an empty one, and a model that stays for others by a tombstone. The tensor or model itself,
    and a container that others may use, are not changed.
    """

    is_silent = True

    def __init__(self, thing: Any, name: str, *, is_named: bool) -> None:
        super().__init__(thing, name, is_named=is_named)
        self._spared: Set[int] = frozenset()

    def spare(self, used: Set[int]) -> None:
        super().spare(used)
        self._spared = used

    def give_up(self, place: str, trash: list[Any]) -> None:
        thing, self._place, self._kinds = self.thing, place, Kinds(whole_torch())
        if is_instance(thing, dict):
            self._let_go(thing, dict.items(thing), dict.__setitem__, trash)
        slots = {slot.__name__: slot for slot in slots_of(type(thing))}
        attributes = attributes_of(thing)
        filled = [name for name in attributes if name in slots]
        in_slots = [(slots[name], attributes.pop(name)) for name in filled]
        if attributes:
            self._let_go(contents_of(thing), attributes.items(), dict.__setitem__, trash)
        self._let_go(thing, in_slots, _set_slot, trash)

    def _let_go(self, owner: Any, items: Any, put: Any, trash: list[Any]) -> None:
        for key, value in list(items):
            emptied = self._without_tensors(value, _LEVELS)
            if emptied is not value:
                trash.append(value)
                put(owner, key, emptied)

    def _without_tensors(self, value: Any, levels: int) -> Any:
        kind = self._kinds(value)
        if kind is Kind.TENSOR:
            return nothing_like(whole_torch(), value)
        if kind in TARGETS and id(value) in self._spared:
            return stand_in(value, f"the {name_of(type(value))} of {self.name}", self._place)
        if kind not in CONTAINERS or kind is Kind.RECORD or not levels:
            return value
        parts = {id(part): part for part, _ in parts_of(value, "", self._kinds)}
        emptied = {key: self._without_tensors(part, levels - 1) for key, part in parts.items()}
        if all(emptied[key] is part for key, part in parts.items()):
            return value
        exact = type(value)
        is_mapping = exact is dict or exact is OrderedDict
        if exact not in _REBUILT or (is_mapping and not _PLAIN_KEYS.issuperset(map(type, value))):
            return None  # A copy would run code of the program, such as the hash of a key.
        if is_mapping:
            return exact((key, emptied.get(id(part), part)) for key, part in value.items())
        return exact(emptied.get(id(part), part) for part in value)


def _set_slot(owner: Any, slot: Any, value: Any) -> None:
    slot.__set__(owner, value)
