"""Count what objects hold, with none of their code run.

What is theirs is followed: attributes, private ones and those in ``__slots__`` too, and what lies
in dictionaries, lists and objects under them (a cache of keys and values, say). Other modules
that they merely refer to come last: their tensors count only where they go as well.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from gc import get_referents
from itertools import repeat
from typing import Any

from torch_utils._releasing.classes import is_among, name_of
from torch_utils._releasing.reading import (
    DICT,
    LEAF,
    MODULE,
    SEQUENCE,
    TENSOR,
    entries_of,
    slots_of,
)
from torch_utils._releasing.registered import Registered
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.trees import Tree, contents_of_all, ids_of_types, in_steps, types_of
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
    if is_among(kind, inventory.plain_tensors):
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


def count_modules(inventory: Inventory, root: str, tree: Tree) -> None:
    """Note the tensors of a tree of modules: registered, and in attributes of any kind.

    To be called with torch functions disabled.
    """
    inventory.own_modules.update(map(id, tree.modules))
    registered = Registered(inventory)
    for modules in in_steps(tree.modules):
        contents = contents_of_all(modules)
        for name in ("_parameters", "_buffers"):
            registries: list[Any] = list(map(dict.get, contents, repeat(name)))
            if ids_of_types(registries) != {id(dict)}:
                registries = [dict(zip(*entries_of(one), strict=True)) for one in registries]
            try:
                alone = list(registered.note(root, tree.paths, modules, registries))
            except RuntimeError:  # Another thread has changed one meanwhile.
                registries = [dict(one) for one in registries]
                alone = list(registered.note(root, tree.paths, modules, registries))
            for owner, part, tensor in alone:
                count_tensor(inventory, part, tensor, owner=owner)
        _count_others(inventory, root, tree, modules, contents)


def _count_others(
    inventory: Inventory,
    root: str,
    tree: Tree,
    modules: Sequence[Any],
    contents: Sequence[dict[str, Any]],
) -> None:
    """Note what some modules have in other attributes, and in slots."""
    kind_of, slots = inventory.kinds.of, inventory.kinds.slots
    found: list[tuple[Any, str, Any]] = []
    for name in set().union(*contents) - _OWN_PARTS:
        parts = list(map(dict.get, contents, repeat(name)))
        if not ids_of_types(parts) <= _PLAIN_VALUES:
            found += [(m, name, p) for m, p in zip(modules, parts, strict=True) if p is not None]
    if any(map(slots_of, types_of(modules))):
        found += [(module, name, part) for module in modules for name, part in slots(module)]
    for module, name, part in found:
        if kind_of(type(part)) != LEAF:
            path = tree.paths[id(module)]
            where = f"{root}.{path}" if path else root
            _count(inventory, where, name, part, _LEVELS, beyond=False)


_PLAIN_VALUES = frozenset(map(id, (bool, int, float, str, type(None))))


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
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            _count(inventory, owner, name, contents, depth, beyond=False)


def count_tensors(inventory: Inventory, tensors: Sequence[Any], names: Sequence[str]) -> None:
    """Note tensors, each with a name, in steps of C as far as they are plain ones."""
    torch = whole_torch()
    if torch is not None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for position in Registered(inventory).note_tensors(tensors, names.__getitem__):
                tensor = tensors[position]
                _count(inventory, "", names[position], tensor, _LEVELS, beyond=False)


def count_beyond(inventory: Inventory) -> None:
    """Note, when all that is given up was counted, what the modules hold that it refers to."""
    torch = whole_torch()
    if torch is None:
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        while inventory.referred_to:
            module = inventory.referred_to.pop()
            if id(module) not in inventory.own_modules:
                _count(inventory, "", name_of(type(module)), module, _LEVELS, beyond=True)


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
