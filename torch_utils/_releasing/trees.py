"""The modules of a tree, and how many of the references to each are the tree's own."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

from torch_utils._releasing.reading import contents_of, entries_of
from torch_utils._releasing.tombstone import is_released
from torch_utils._runtime import whole_torch

_REFERENCES_TO_A_REGISTRY = 3  # the module's, the variable's, and getrefcount's


class References:
    """The references that trees make to their modules.

    Attributes:
        own: The ids of the modules in the trees.
        children: Each module that a tree's module contains, once.
        counts: By a module's id, how often those contain it.
        listed: By a module's id, in how many trees' lists it is.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.children: list[Any] = []
        self.counts: dict[int, int] = {}
        self.listed: dict[int, int] = {}


class Tree:
    """The modules of a tree, each once and the root first, in flat lists.

    Attributes:
        modules: The modules.
        paths: The path of each from the root, which itself has "".
    """

    def __init__(
        self, root: Any, *, spared: Set[int] = frozenset(), references: References | None = None
    ) -> None:
        self.modules: list[Any] = []
        self.paths: list[str] = []
        seen = set(spared)
        pending, their_paths = [root], [""]
        while pending:
            module, path = pending.pop(), their_paths.pop()
            key = id(module)
            if key in seen or is_released(module):
                continue
            seen.add(key)
            self.modules.append(module)
            self.paths.append(path)
            names, children = children_of(module)
            if children:
                pending += children
                if path:
                    their_paths += [f"{path}.{name}" if name else path for name in names]
                else:
                    their_paths += names
                if references is not None and key not in references.own:
                    _add(references, module, children)
            if references is not None:
                references.own.add(key)
                references.listed[key] = references.listed.get(key, 0) + 1


def _add(references: References, module: Any, children: list[Any]) -> None:
    registry = contents_of(module).get("_modules")
    counts = references.counts
    # A shallow copy of a module has the very same dictionary, and so the children.
    one = 1 if sys.getrefcount(registry) <= _REFERENCES_TO_A_REGISTRY else -sys.maxsize
    for child in children:
        key = id(child)
        if key in counts:
            counts[key] += one
        else:
            counts[key] = one
            references.children.append(child)


def children_of(module: Any) -> tuple[list[str], list[Any]]:
    """List the names and the modules that a module contains."""
    contents = contents_of(module)
    registry = contents.get("_modules")
    traced = contents.get("_actual_script_module")  # What torch.jit.trace puts a shell around.
    if traced is None and type(registry) is dict and not registry:
        return [], []
    names, children = entries_of(registry)
    if traced is not None:
        names, children = [*names, ""], [*children, traced]
    torch: Any = whole_torch()
    kind = torch.nn.Module
    chosen = [i for i, child in enumerate(children) if issubclass(type(child), kind)]
    if len(chosen) < len(children):
        names, children = [names[i] for i in chosen], [children[i] for i in chosen]
    return [name if type(name) is str else "?" for name in names], children
