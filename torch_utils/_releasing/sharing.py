"""Which submodules a live model contains too, and a release must leave whole."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence, Set
from functools import partial
from itertools import chain, repeat
from types import CellType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any

from torch_utils._releasing.classes import is_among
from torch_utils._releasing.modules import ModuleTarget
from torch_utils._releasing.reading import (
    DICT,
    MODULE,
    OTHER,
    SEQUENCE,
    Kinds,
    contents_of,
    entries_of,
)
from torch_utils._releasing.trees import Tree, children_of, contents_of_all
from torch_utils._runtime import has_frozen, whole_torch

_METHODS = (MethodType, partial)
_LEADING = (*_METHODS, tuple)  # to more of them: a partial's function and arguments
_LEVELS = 9  # of containers and objects within each other; the first is a module's dictionary
_HOLDERS = (DICT, SEQUENCE, OTHER)
# What they have is as much its owner's, though they are made in C.
_HOLDING = (*_METHODS, FunctionType, CellType, SimpleNamespace, MappingProxyType)


def spare_shared(targets: Sequence[ModuleTarget]) -> Set[int]:
    """Find the submodules that a module outside these trees has too, to be left whole.

    A module has what is among its submodules, whatever mapping it keeps those in, and what its
    attributes lead to: containers, objects, methods, closures. A variable, or a list that no module
    has, does not count as sharing. Whatever is below a shared one is shared as well.

    Counting references answers for most models. If somebody else refers to a submodule, the
    heap is walked, once for all of them. What `gc.freeze` has put aside that walk does not see:
    then whoever else refers to a submodule is taken for a module.

    Returns:
        The ids of those that are spared, which the targets have noted as well.
    """
    trees = []
    for target in targets:
        target.tree = Tree(target.module)
        trees.append(target.tree)
    suspects = _with_other_references(trees)
    for target in targets:
        suspects.pop(id(target.module), None)  # Asked for by name: not spared.
    if not suspects:
        return frozenset()
    own = {id(module) for tree in trees for module in tree.modules}
    found = set(suspects) if has_frozen() else _had_by_others(suspects, own)
    below: set[int] = set()
    for key in found:
        below.update(map(id, Tree(suspects[key], spared=below).modules))
    below.difference_update([id(target.module) for target in targets])
    for target in targets:
        target.shared = below
    return below


def parameters_of_others(keys: Set[int], targets: Sequence[ModuleTarget]) -> Set[int]:
    """Choose the parameters, by their ids, that a module outside of the targets' trees has.

    What `gc.freeze` has put aside cannot be listed: then all of them.
    """
    if has_frozen():
        return keys
    trees = [target.tree or Tree(target.module) for target in targets]
    own = {id(module) for tree in trees for module in tree.modules}
    own.difference_update(*(target.shared for target in targets))
    others = [module for module in _all_modules() if id(module) not in own]
    registries = map(dict.get, contents_of_all(others), repeat("_parameters"))
    return keys & set(map(id, chain.from_iterable(entries_of(one)[1] for one in registries)))


def _with_other_references(trees: Sequence[Tree]) -> dict[int, Any]:
    """Choose the modules that something else may refer to, by their ids."""
    contained = list(chain.from_iterable(chain.from_iterable(tree.children for tree in trees)))
    doubtful = _in_shared_registries(trees)
    is_simple = len(trees) == 1 and not doubtful and len(set(map(id, contained))) == len(contained)
    # Beside what is counted of any object: that of the module that contains it, and two lists'.
    usual = _OF_A_LISTED_OBJECT + 3
    if is_simple and max(map(sys.getrefcount, contained), default=0) <= usual:
        return {}
    own = Counter(map(id, chain(contained, *(tree.modules for tree in trees))))
    own.update(map(id, contained))  # The trees' lists; and then, what the modules refer to.
    parents: set[int] = set()
    for tree in trees:
        for number, children in zip(tree.parents, tree.children, strict=True):
            if id(tree.modules[number]) not in parents:
                parents.add(id(tree.modules[number]))
                own.update(map(id, children))
    counts = list(map(sys.getrefcount, contained))  # Now, while no variable has one of them.
    chosen = {
        id(module): module
        for module, count in zip(contained, counts, strict=True)
        if count >= _OF_A_LISTED_OBJECT + own[id(module)] or id(module) in doubtful
    }
    methods = _references_of_own_methods(chosen)
    everyone = list(chosen.values())
    for module, count in zip(everyone, list(map(sys.getrefcount, everyone)), strict=True):
        # Two more: the dictionary's, and the list's of them.
        expected = _OF_A_LISTED_OBJECT + own[id(module)] + methods.get(id(module), 0) + 1
        if count <= expected and id(module) not in doubtful:
            del chosen[id(module)]
    return chosen


def _in_shared_registries(trees: Sequence[Tree]) -> set[int]:
    """List what modules contain whose dictionary others have too: the shallow copy of one, say."""
    found: set[int] = set()
    for tree in trees:
        for number, children in zip(tree.parents, tree.children, strict=True):
            registry = contents_of(tree.modules[number]).get("_modules")
            if sys.getrefcount(registry) > _REFERENCES_TO_A_REGISTRY:
                found.update(map(id, children))
    return found


_REFERENCES_TO_A_REGISTRY = 3  # the module's, the variable's, and getrefcount's
(_OF_A_LISTED_OBJECT,) = map(sys.getrefcount, [object()])


def _references_of_own_methods(modules: dict[int, Any]) -> dict[int, int]:
    """Count the references that methods kept in the modules' own attributes make to them.

    accelerate's hooks put them there: the former ``forward``, and a partial around it.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    for module in modules.values():
        pending = [v for v in list(contents_of(module).values()) if is_among(type(v), _METHODS)]
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for referent in gc.get_referents(value):
                if id(referent) in modules:
                    found[id(referent)] = found.get(id(referent), 0) + 1
                elif is_among(type(referent), _LEADING):
                    pending.append(referent)
    return found


def _had_by_others(suspects: dict[int, Any], own: set[int]) -> set[int]:
    """Find those that some module outside the trees has, in one walk of the heap.

    And from there level by level, so that whatever lies near a module is reached the near way.
    """
    kinds = Kinds(whole_torch())
    others = [module for module in _all_modules() if id(module) not in own]
    found = set(map(id, chain.from_iterable(children_of(module)[1] for module in others)))
    things = gc.get_referents(*others)
    seen: set[int] = set()
    for _ in range(_LEVELS):
        followed = []
        for thing in things:
            kind = kinds.of(type(thing))
            if kind == MODULE:
                found.add(id(thing))
            elif (kind in _HOLDERS or is_among(type(thing), _HOLDING)) and id(thing) not in seen:
                seen.add(id(thing))
                followed.append(thing)
        functions = [thing for thing in followed if type(thing) is FunctionType]
        # Its globals would lead everywhere.
        things = [part for f in functions for part in (f.__closure__, f.__defaults__)]
        things += gc.get_referents(*(t for t in followed if type(t) is not FunctionType))
    return found & suspects.keys()


def _all_modules() -> list[Any]:
    """List every module that there is: those who refer to a class of modules that has instances.

    Never holds a list of all objects while another thread may run: among them are tuples that
    others are just building, and a reference to one of these makes its owner's ``tuple(...)`` a
    SystemError. So their types are collected in one step of C.
    """
    torch = whole_torch()
    known: dict[int, type] = {}
    pending = [] if torch is None else [torch.nn.Module]
    while pending:
        kind = pending.pop()
        if id(kind) not in known:
            known[id(kind)] = kind
            pending += type.__subclasses__(kind)
    everything = chain.from_iterable(map(gc.get_objects, (None,)))
    alive = known.keys() & set(map(id, map(type, everything)))
    kinds = [known[key] for key in alive]
    return [t for t in gc.get_referrers(*kinds) if id(type(t)) in alive] if kinds else []
