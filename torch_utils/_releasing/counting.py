"""Count what objects hold, with none of their code run.

What is theirs is followed: attributes, private ones and those in ``__slots__`` too, and what lies
in dictionaries, lists and objects under them (a cache of keys and values, say). Other modules
that they merely refer to come last: their tensors count only where they go as well.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from gc import get_referents
from typing import Any

from torch_utils._releasing.reading import (
    DICT,
    LEAF,
    MODULE,
    SEQUENCE,
    TENSOR,
    contents_of,
    entries_of,
    undisturbed,
)
from torch_utils._releasing.storages import Inventory
from torch_utils._runtime import whole_torch

_LEVELS = 8  # of containers and objects within each other


def count_tensor(
    inventory: Inventory, name: str, tensor: Any, *, owner: str = "", beyond: bool = False
) -> None:
    """Note a tensor, its gradient, and what it has in its attributes (a wrapper's inner tensors).

    To be called with torch functions disabled, as `count_contents` does.
    """
    inventory.add(owner, name, tensor, beyond=beyond)
    kind = type(tensor)
    if kind in inventory.plain_tensors:
        gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    else:  # A class of the program's own may have redefined them.
        base = inventory.plain_tensors[0]
        has_one = base.is_leaf.__get__(tensor) or base.retains_grad.__get__(tensor)
        gradient = base.grad.__get__(tensor) if has_one else None
    if gradient is not None:
        inventory.add(owner, f"{name}.grad", gradient, beyond=beyond)
    _count_attributes(inventory, owner, name, tensor, beyond=beyond)


def _count_attributes(
    inventory: Inventory, owner: str, name: str, tensor: Any, *, beyond: bool = False
) -> None:
    for referent in get_referents(tensor):
        if gc.is_tracked(referent):
            _count(inventory, owner, name, referent, _LEVELS, beyond)


def count_modules(
    inventory: Inventory, root: str, paths: Sequence[str], modules: Sequence[Any]
) -> None:
    """Note the tensors of a tree of modules: registered, and in attributes of any kind.

    To be called undisturbed. One loop, for a call for each of thousands of layers adds up.
    """
    kind_of, slots = inventory.kinds.of, inventory.kinds.slots
    inventory.own_modules.update(map(id, modules))
    count_registered = _registered_counter(inventory)
    for path, module in zip(paths, modules, strict=True):
        where = f"{root}.{path}" if path else root
        contents = contents_of(module)
        for registry in (contents.get("_parameters"), contents.get("_buffers")):
            if type(registry) is not dict:
                count_registered(where, dict(zip(*entries_of(registry), strict=True)))
            elif registry:
                try:
                    count_registered(where, registry)
                except RuntimeError:  # Another thread has changed it meanwhile.
                    count_registered(where, dict(registry))
        for name in contents.keys() - _OWN_PARTS:
            part = contents.get(name)
            if type(part) not in _PLAIN_VALUES and kind_of(type(part)) != LEAF:
                _count(inventory, where, name, part, _LEVELS, beyond=False)
        for name, part in slots(module):
            _count(inventory, where, name, part, _LEVELS, beyond=False)


def _registered_counter(inventory: Inventory) -> Callable[[str, dict[Any, Any]], None]:
    add, plain = inventory.adder(), frozenset(inventory.plain_tensors)

    def count_registered(owner: str, tensors: dict[Any, Any]) -> None:
        # A tensor refers to its class, and only one with attributes to anything else.
        have_attributes = len(get_referents(*tensors.values())) > len(tensors)
        for name, tensor in tensors.items():
            if have_attributes or type(tensor) not in plain:
                if tensor is not None:
                    count_tensor(inventory, name, tensor, owner=owner)
                continue
            add(owner, name, tensor)
            # Asking other tensors for one warns.
            gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            if gradient is not None:
                add(owner, f"{name}.grad", gradient)

    return count_registered


_PLAIN_VALUES = frozenset((bool, int, float, str, type(None)))


# What every module has; nothing is lost if a version of torch has more.
_OWN_PARTS = frozenset(
    (
        *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
        *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        *("_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)


def count_contents(
    inventory: Inventory, name: str, contents: Any, depth: int = _LEVELS, *, owner: str = ""
) -> None:
    """Note the tensors in nested containers and objects."""
    torch = whole_torch()
    if torch is not None:
        with undisturbed(torch):
            _count(inventory, owner, name, contents, depth, beyond=False)


def count_beyond(inventory: Inventory) -> None:
    """Note, when all that is given up was counted, what the modules hold that it refers to."""
    torch = whole_torch()
    if torch is None:
        return
    with undisturbed(torch):
        while inventory.referred_to:
            module = inventory.referred_to.pop()
            if id(module) not in inventory.own_modules:
                _count(inventory, "", type(module).__name__, module, _LEVELS, beyond=True)


def _count(
    inventory: Inventory, owner: str, name: str, contents: Any, depth: int, beyond: bool
) -> None:
    kind_of, seen = inventory.kinds.of, inventory.looked_into
    things, names, levels = [contents], [name], [depth]  # flat lists, no tuple for each
    while things:
        thing, where, level = things.pop(), names.pop(), levels.pop()
        kind = kind_of(type(thing))
        if kind == TENSOR:
            if id(thing) not in seen:
                seen.add(id(thing))
                count_tensor(inventory, where, thing, owner=owner, beyond=beyond)
            continue
        if kind == LEAF or not level or id(thing) in seen or not gc.is_tracked(thing):
            continue
        if kind == MODULE and (not beyond or id(thing) in inventory.own_modules):
            inventory.referred_to.append(thing)
            continue
        seen.add(id(thing))
        keys, values = entries_of(thing) if kind == DICT else (None, get_referents(thing))
        inventory.looks_left -= len(values)
        if inventory.looks_left < 0:
            return
        for index, value in enumerate(values):
            if kind_of(type(value)) != LEAF:
                things.append(value)
                levels.append(level - 1)
                names.append(_part(where, kind, keys[index] if keys else index))


def _part(where: str, kind: int, key: Any) -> str:
    """Name an entry, without asking its key for a text of its own."""
    if kind == DICT and type(key) is str:
        return f"{where}.{key}"
    if type(key) is int and kind in (DICT, SEQUENCE):
        return f"{where}[{key}]"
    return where
