"""Modules: empty a whole tree of them in place, and spare what a live model shares.

Weights are shared in two ways. Two modules may hold the same Parameter: each then loses only
its own reference. Or two models may contain the same submodule: that one is left whole.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch_utils._releasing.classes import name_of
from torch_utils._releasing.counting import count_modules
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import Burial, is_released
from torch_utils._releasing.trees import Tree, in_steps
from torch_utils._runtime import early_bound, whole_torch


class ModuleTarget(Target):
    """A module and what it contains."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name)
        self.module = module
        self.shared: Set[int] = frozenset()
        self.tree: Tree | None = None
        self._burials: list[Burial] | None = None

    def count(self, inventory: Inventory) -> None:
        torch: Any = whole_torch()
        # What is spared too: this model lets go of it, and the report says that it lives on.
        self.tree = tree = self.tree or Tree(self.module)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            count_modules(inventory, self.name, tree)

    def give_up(self, place: str) -> None:
        if self._burials is None:  # Else this was interrupted, and there is no tree to see.
            if is_released(self.module):
                return  # By its own ``close``.
            tree = self.tree or Tree(self.module)
            given_up = Tree(self.module, spared=self.shared) if self.shared else tree
            names = _Names(self.name, given_up)
            # From the root down: a thread that is computing with the model meets a tombstone,
            # and not a layer without its weights.
            self._burials = [Burial(some, names, place) for some in in_steps(given_up.modules)]
        for burial in self._burials:
            burial.finish()
        # What was spared may be garbage by now, and would be kept by these.
        self.tree = None
        self._burials = []


class _Names:
    """What messages call the modules of a tree, by their ids. Keeps none of them alive."""

    def __init__(self, root: str, tree: Tree) -> None:
        self._root = root
        self._paths = tree.paths

    @early_bound
    def __call__(self, key: int, kind: type) -> str:
        path = self._paths[key]
        return f"{path!r} of {self._root} (a {name_of(kind)})" if path else f"this {name_of(kind)}"
