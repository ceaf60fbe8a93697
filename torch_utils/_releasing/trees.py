"""The modules of a tree, read in steps of C: a call in Python for each of thousands adds up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from itertools import compress, repeat
from typing import Any

from torch_utils._releasing.reading import contents_of, entries_of
from torch_utils._releasing.tombstone import is_tombstone_class
from torch_utils._runtime import early_bound, whole_torch

AT_ONCE = 256
"""How many modules, or tensors, one step takes: other threads wait until it has ended."""

_REGISTRIES = frozenset((id(dict), id(OrderedDict)))  # whose truth value is C's


class Paths:
    """The path of each module of a tree from the root, by its id; made for those that are asked.

    Keeps no module alive. The root itself has "".
    """

    def __init__(self, root: int, parents: list[int]) -> None:
        self._parents = parents
        self._names: list[list[str]] = []
        self._children: list[list[int]] = []
        self._known = {root: ""}

    def add(self, names: list[str], children: list[int]) -> None:
        """Note what the next one of the parents contains."""
        self._names.append(names)
        self._children.append(children)

    @early_bound
    def __getitem__(self, key: int) -> str:
        known = self._known
        if key not in known:
            for parent, names, children in zip(
                self._parents, self._names, self._children, strict=False
            ):
                path = known.get(parent, "")
                for name, child in zip(names, children, strict=True):
                    if child not in known:
                        known[child] = f"{path}.{name}" if path and name else path or name
            self._parents = []
        return known.get(key, "")


class Tree:
    """The modules of a tree, each once and the root first, level by level.

    Attributes:
        modules: The modules.
        paths: Where each is in the tree.
        parents: Which of the modules contain others, by their numbers.
        children: What each of those contains; a module may be contained more than once.
    """

    def __init__(self, root: Any, *, spared: Set[int] = frozenset()) -> None:
        self.modules: list[Any] = []
        self.parents: list[int] = []
        self.children: list[list[Any]] = []
        parents: list[int] = []
        self.paths = Paths(id(root), parents)
        seen = set(spared)
        level = [root]
        while level:
            deeper: list[Any] = []
            for some in in_steps(_fresh(level, seen)):
                first = len(self.modules)
                self.modules += some
                for number in _that_contain(some):
                    names, children = children_of(some[number])
                    if children:
                        parents.append(id(some[number]))
                        self.paths.add(names, list(map(id, children)))
                        self.parents.append(first + number)
                        self.children.append(children)
                        deeper += children
            level = deeper

    def parents_first(self) -> list[Any]:
        """List the modules so that everything that contains one comes before it.

        Circles aside. The modules are not looked at again.
        """
        numbers = {id(module): number for number, module in enumerate(self.modules)}
        contained = {
            parent: [numbers[id(child)] for child in children if id(child) in numbers]
            for parent, children in zip(self.parents, self.children, strict=True)
        }
        finished: list[int] = []
        seen: set[int] = set()
        pending = [0] if self.modules else []
        while pending:
            number = pending.pop()
            if number < 0:  # All that it contains has been passed.
                finished.append(~number)
            elif number not in seen:
                seen.add(number)
                pending.append(~number)
                pending += contained.get(number, ())
        return [self.modules[number] for number in reversed(finished)]


def in_steps(things: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield them some at a time."""
    for start in range(0, len(things), AT_ONCE):
        yield things[start : start + AT_ONCE]


def contents_of_all(modules: Sequence[Any]) -> list[dict[str, Any]]:
    """Return `contents_of` of each."""
    return list(map(object.__getattribute__, modules, repeat("__dict__")))


def ids_of_types(things: Sequence[Any]) -> set[int]:
    """Return the ids of their types; a type itself may define what equal means."""
    return set(map(id, map(type, things)))


def types_of(things: Sequence[Any]) -> list[type]:
    """List their types, each once."""
    kinds = list(map(type, things))
    return list(dict(zip(map(id, kinds), kinds, strict=True)).values())


def _fresh(modules: list[Any], seen: set[int]) -> list[Any]:
    """Choose those that are new and were not released, each once."""
    keys = list(map(id, modules))
    if (
        seen.isdisjoint(keys)
        and len(set(keys)) == len(keys)
        and not any(map(is_tombstone_class, types_of(modules)))
    ):
        seen.update(keys)
        return modules
    chosen = []
    for key, module in zip(keys, modules, strict=True):
        if key not in seen and not is_tombstone_class(type(module)):
            seen.add(key)
            chosen.append(module)
    return chosen


def _that_contain(modules: Sequence[Any]) -> Sequence[int]:
    """Choose those that may contain modules, by their numbers."""
    contents = contents_of_all(modules)
    registries = list(map(dict.get, contents, repeat("_modules")))
    traced = map(dict.get, contents, repeat("_actual_script_module"))
    everyone = range(len(modules))
    if ids_of_types(registries) <= _REGISTRIES and set(map(id, traced)) == {id(None)}:
        return list(compress(everyone, registries))
    return everyone


def children_of(module: Any) -> tuple[list[str], list[Any]]:
    """List the names and the modules that a module contains."""
    contents = contents_of(module)
    names, children = entries_of(contents.get("_modules"))
    traced = contents.get("_actual_script_module")  # What torch.jit.trace puts a shell around.
    if traced is not None:
        names, children = [*names, ""], [*children, traced]
    torch: Any = whole_torch()
    base = torch.nn.Module
    if not all(issubclass(kind, base) for kind in types_of(children)):
        is_module = [issubclass(type(child), base) for child in children]
        names, children = list(compress(names, is_module)), list(compress(children, is_module))
    if ids_of_types(names) - {id(str)}:
        names = [name if type(name) is str else "?" for name in names]
    return names, children
