"""Find what a released object contains but an object outside also uses, so that it stays whole.

An object outside is a live module or any other object with attributes. Variables of functions and
modules do not count, nor does a list or dictionary to which only a variable refers.

For most models reference counts are enough. If a count is higher than the known references explain,
the references among all that the released objects lead to are counted. Only if one is still not
explained is the heap walked: once for each level of lists, dictionaries and methods that is found.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from gc import is_tracked
from typing import Any

from torch_utils._runtime import has_frozen, whole_torch
from torch_utils.releasing.objects import (
    SUSPENDABLE,
    contents_of,
    find_in_class,
    is_instance,
    module_of,
)
from torch_utils.releasing.targets import CLAIMS, Target, children_of

_AT_ONCE = 16
"""The time of a walk of the heap grows with the number of objects that it looks for."""
_MOST_WALKS = 3
_MOST_PASSING = 512  # Each running method of a module has two or three.
_LEVELS = 3  # of containers between an object outside and a suspect
_MOST_NODES = 200_000
_DEAD_ENDS = frozenset(map(id, (types.FrameType, *SUSPENDABLE)))
_VARIABLES = frozenset(map(id, (types.FrameType, types.CellType, types.FunctionType, *SUSPENDABLE)))
_PASSING_TYPES: tuple[type, ...] = (
    *(list, tuple, set, frozenset, dict, deque, types.MethodType, functools.partial),
    *(types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())),
)
_PASSING = frozenset(map(id, _PASSING_TYPES))
_OF_ITERATORS = ("builtins", "itertools")
_PACKAGE = __name__.rpartition(".")[0]


def used_by_others(
    targets: Sequence[Target], containers: dict[int, Any], references: Counter[int]
) -> set[int]:
    """Return the ids of contained objects that an object outside leads to.

    References that cannot be explained count as such objects if `gc.freeze` hides part of the heap,
    or if there are too many of them.

    Args:
        targets: All targets of a release.
        containers: Containers in the attributes of targets, by their ids.
        references: The number of known references to contained objects.
    """
    named = {id(target.thing) for target in targets if target.is_named}
    contained = {id(t.thing): t.thing for t in targets if not t.is_named and not t.is_tensor}
    contained.update(containers)
    known = references + Counter(id(t.thing) for t in targets) + Counter(containers.keys())
    known.update(CLAIMS.keys())
    seen: set[int] = set()
    for key, module in _modules_of(targets):
        known[key] += 1
        if key not in seen:  # It may be in the trees of two targets.
            seen.add(key)
            known.update(id(child) for _, child in children_of(module))
            # A shallow copy of a module shares the registry of its original.
            registry = contents_of(module).get("_modules")
            if is_instance(registry, dict):
                contained[id(registry)] = registry
                known[id(registry)] += 1
        if key not in named:
            contained[key] = module
    module = registry = None  # A reference of its own would not be explained.
    suspects = _with_more_references(contained, known)
    if not suspects:
        return set()
    inside, counts = reachable([targets, containers, CLAIMS])
    if has_frozen() or len(inside) > _MOST_NODES:
        used = suspects
    else:
        counts.update(contained.keys())
        extra = _with_more_references(inside, counts) - named
        asked = {key: inside[key] for key in extra if key in contained}
        mine = {id(targets), id(containers), id(CLAIMS)}
        used = {key for key in extra - asked.keys() - mine if not _is_of_variables(inside[key])}
        # A record or a library object stays also for a variable: using it would not raise.
        used |= {id(t.thing) for t in targets if t.is_silent and not t.is_named} & asked.keys()
        asked = {key: thing for key, thing in asked.items() if key not in used}
        used |= _Search(inside, counts, {id(contained), id(asked)}).run(asked)
    alive, _ = reachable([inside[key] for key in used & inside.keys()], stop=named)
    return alive.keys() & contained.keys()


def _modules_of(targets: Sequence[Target]) -> Iterator[tuple[int, Any]]:
    return ((id(module), module) for target in targets for module, _ in target.tree)


class _Search:
    """A search of the heap for objects outside, some suspects at a time.

    Args:
        inside: What the released objects lead to, by id.
        counts: The number of references from there.
        mine: The ids of this release's own objects.
    """

    def __init__(self, inside: dict[int, Any], counts: Counter[int], mine: set[int]) -> None:
        self._mine = {*mine, *inside, id(inside), id(counts)}
        self._counts = counts
        self._seen: set[int] = set()

    def run(self, suspects: dict[int, Any]) -> set[int]:
        """Return the ids of suspects to which an object outside refers.

        A list, dictionary or method to which only a variable refers explains all its references.
        """
        used: set[int] = set()
        remaining = suspects
        for _ in range(_MOST_WALKS):
            batch = [remaining[key] for key in list(remaining)[:_AT_ONCE]]
            used |= self._held(batch, _LEVELS) & suspects.keys()
            more = _with_more_references(suspects, self._counts + Counter(remaining.keys()))
            keys = [key for key in list(remaining)[_AT_ONCE:] if key in more and key not in used]
            remaining = {key: suspects[key] for key in keys}
            self._mine.add(id(remaining))
            if not remaining:
                break
        return used | remaining.keys()

    def _held(self, things: list[Any], levels: int) -> set[int]:
        """Return the ids of all that objects outside refer to, if that includes the things."""
        if not levels or len(things) > _MOST_PASSING:
            return {id(thing) for thing in things}
        self._mine.add(id(things))
        held: set[int] = set()
        for start in range(0, len(things), _AT_ONCE):
            arguments = tuple(things[start : start + _AT_ONCE])
            self._mine.add(id(arguments))  # From Python 3.13 on, it is found as well.
            found = [one for one in gc.get_referrers(*arguments) if id(one) not in self._mine]
            self._mine.add(id(found))
            for one in found:
                self._explain(one, 0 if _is_of_variables(one) else _LEVELS - levels)
            objects = [one for one in found if not _is_of_variables(one)]
            passing = [one for one in objects if _is_passing(one)]
            self._mine.update((id(objects), id(passing)))
            beyond = self._held(passing, levels - 1)
            outside = [one for one in objects if not _is_passing(one) or id(one) in beyond]
            held.update(id(part) for one in outside for part in gc.get_referents(one))
        return held

    def _explain(self, one: Any, levels: int) -> None:
        """Count the references of a container, and of the containers in it."""
        if id(one) in self._seen:
            return
        self._seen.add(id(one))
        for part in gc.get_referents(one):
            self._counts[id(part)] += 1
            if levels and _is_passing(part):
                self._explain(part, levels - 1)


def _is_of_variables(thing: Any) -> bool:
    """Return whether an object holds variables of a function, a module or a notebook."""
    return (
        id(type(thing)) in _VARIABLES
        or (type(thing) is dict and ("__builtins__" in thing or thing is _outputs_of_notebook()))
        or module_of(type(thing)).startswith((_PACKAGE, "IPython.", "ipykernel."))
    )


def _is_passing(thing: Any) -> bool:
    """Return whether what refers to an object, such as a list, is the one that uses its parts."""
    kind = type(thing)
    return id(kind) in _PASSING or (
        module_of(kind) in _OF_ITERATORS and find_in_class(kind, "__next__") is not None
    )


def _outputs_of_notebook() -> Any:
    main = sys.modules.get("__main__")
    return vars(main).get("_oh") if type(main) is types.ModuleType else None


def reachable(
    roots: Iterable[Any], stop: Collection[int] = ()
) -> tuple[dict[int, Any], Counter[int]]:
    """Return what roots lead to, and how many references to each object were met.

    Tensors, classes, functions' globals and modules are not entered.
    """
    torch: Any = whole_torch()
    found = {id(root): root for root in roots}
    counts: Counter[int] = Counter()
    pending = list(found.values())
    while pending and len(found) <= _MOST_NODES:
        thing = pending.pop()
        for part in filter(is_tracked, gc.get_referents(thing)):
            counts[id(part)] += 1
            if id(part) in found or id(part) in stop or _is_dead_end(part):
                continue
            found[id(part)] = part
            if not is_instance(part, torch.Tensor):
                pending.append(part)
    return found, counts


def _is_dead_end(thing: Any) -> bool:
    kind = type(thing)
    if kind is dict:
        return "__builtins__" in thing
    is_namespace = is_instance(thing, type) or is_instance(thing, types.ModuleType)
    return is_namespace or id(kind) in _DEAD_ENDS


def _with_more_references(things: dict[int, Any], known: Counter[int]) -> set[int]:
    """Return the keys of things with more references than the known ones and the dictionary's."""
    return {key for key in things if sys.getrefcount(things[key]) > _OF_A_VALUE + known[key]}


def _references_of_a_value() -> int:
    things = {0: object()}
    return next(sys.getrefcount(things[key]) for key in things)


_OF_A_VALUE = _references_of_a_value()  # Python versions differ.
