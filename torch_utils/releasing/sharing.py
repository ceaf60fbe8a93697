"""Find weights and submodules that a live model shares, which a release must not touch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import Any

from torch_utils._runtime import has_frozen, whole_torch
from torch_utils.releasing.modules import ModuleTarget, children_of, tree_of
from torch_utils.releasing.objects import (
    CONTAINERS,
    Kinds,
    attributes_of,
    contents_of,
    instances_of,
    parts_of,
)

_LEVELS = 9  # of nested containers in the attributes of a module


def find_shared_submodules(targets: Sequence[ModuleTarget]) -> Set[int]:
    """Find the submodules that a module outside these trees contains as well.

    A module contains its children and what its attributes hold, also in containers. A variable, or
    a list outside of modules, does not count. Everything below a shared submodule is shared.

    For most models reference counts are enough. If a submodule has other references, the heap is
    walked once. That walk does not see objects that `gc.freeze` has excluded, so any other
    reference then counts as sharing.

    Returns:
        The ids of the shared submodules, which are stored in the targets as well.
    """
    named = {id(target.thing) for target in targets}
    tree = {id(module): module for target in targets for module, _ in target.tree}
    suspects = {key: tree[key] for key in _with_other_references(targets, tree) - named}
    if not suspects:
        return frozenset()
    shared = set(suspects)
    if not has_frozen():
        torch: Any = whole_torch()
        kinds = Kinds(torch)
        others = [module for module in instances_of(torch.nn.Module) if id(module) not in tree]
        shared &= {id(part) for module in others for part in _parts_of(module, kinds)}
    below = {id(part) for key in shared for part, _ in tree_of(suspects[key])} - named
    for target in targets:
        target.shared = below
    return below


def tensors_of_others(
    held: dict[int, Any], references: dict[int, int], targets: Sequence[ModuleTarget]
) -> set[int]:
    """Return the ids of tensors that a module outside of the targets' trees has.

    After `gc.freeze` the heap cannot be searched, so all tensors with other references count.

    Args:
        held: Tensors by their ids. A target holds one more reference to each.
        references: The number of other known references to each tensor.
        targets: The modules that are released as well.
    """
    known = Counter(held.keys())
    known.update(references)
    suspects = _with_more_references(held, known)
    if not suspects or has_frozen():
        return suspects
    torch: Any = whole_torch()
    kinds = Kinds(torch)
    own = {id(m) for target in targets for m, _ in tree_of(target.thing, target.shared)}
    others = [module for module in instances_of(torch.nn.Module) if id(module) not in own]
    return suspects & {id(part) for module in others for part in _parts_of(module, kinds)}


def _with_other_references(targets: Sequence[ModuleTarget], tree: dict[int, Any]) -> set[int]:
    """Return the ids of modules that may be referenced from outside of the trees.

    This includes modules in a referenced registry: a shallow copy of a module shares the registry
    of its original.
    """
    registries = {key: contents_of(module).get("_modules") for key, module in tree.items()}
    children = {key: [child for _, child in children_of(tree[key])] for key in tree}
    known = Counter(map(id, chain(registries.values(), *children.values())))
    known.update(map(id, chain.from_iterable(children.values())))  # The lists created here.
    known.update(id(module) for target in targets for module, _ in target.tree)
    found = _with_more_references(tree, known)
    for key in _with_more_references(registries, known):
        found.update(map(id, children[key]))
    return found


def _with_more_references(things: dict[int, Any], known: Counter[int]) -> set[int]:
    """Return the keys of things with more references than the known ones and the dictionary's."""
    return {
        key for key in things if sys.getrefcount(things[key]) > _OF_A_VALUE + known[id(things[key])]
    }


def _references_of_a_value() -> int:
    things = {0: object()}
    return next(sys.getrefcount(things[key]) for key in things)


_OF_A_VALUE = _references_of_a_value()  # Python versions differ.


def _parts_of(module: Any, kinds: Kinds) -> Iterator[Any]:
    """Yield a module's children and what its attributes hold, also in containers."""
    yield from (child for _, child in children_of(module))
    level = list(attributes_of(module).values())
    for _ in range(_LEVELS):
        yield from level
        inside = [parts_of(part, "", kinds) for part in level if kinds(part) in CONTAINERS]
        level = [part for part, _ in chain.from_iterable(inside)]
