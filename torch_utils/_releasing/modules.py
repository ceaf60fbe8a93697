"""Modules: empty a whole tree of them in place, and spare what a live model shares.

Weights are shared in two ways. Two modules may hold the same Parameter: each then loses only
its own reference. Or two models may contain the same submodule: that one is left whole.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch_utils._releasing.counting import count_part, count_tensor
from torch_utils._releasing.reading import LEAF, contents_of, entries_of, undisturbed
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import CLAIM, bury, is_released
from torch_utils._runtime import loaded_torch


class ModuleTarget(Target):
    """A module and what it contains.

    Two threads may release one module: one of them does it, and the other reports nothing.
    """

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name)
        self.module = module
        self.shared: set[int] = set()
        self._token = object()
        self._tree: tuple[list[str], list[Any]] | None = None
        self._counted: tuple[Inventory, int, int] | None = None

    def count(self, inventory: Inventory) -> None:
        torch: Any = loaded_torch()
        begin = inventory.count_contained()
        # What is spared too: this model lets go of it, and the report says that it lives on.
        paths, modules = tree_of(self.module)
        if not self.shared:
            self._tree = paths, modules
        inventory.own_modules.update(map(id, modules))
        with undisturbed(torch):
            for path, module in zip(paths, modules, strict=True):
                _count_module(inventory, _join(self.name, path), module)
        self._counted = inventory, begin, inventory.count_contained()

    def give_up(self, place: str) -> None:
        contents = contents_of(self.module)
        if contents.setdefault(CLAIM, self._token) is not self._token:
            if self._counted is not None:
                inventory, begin, end = self._counted
                inventory.disown(begin, end)
            return
        if self._tree is None:
            self._tree = tree_of(self.module, self.shared)
        # From the root down: a thread that is computing with the model meets a tombstone, and not
        # a layer without its weights. Interrupted, this is called again, and goes over all of it.
        for path, module in zip(*self._tree, strict=True):
            kind = type(module).__name__
            what = f"this {kind}" if not path else f"{path!r} of {self.name} (a {kind})"
            bury(module, what, place)


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


def _count_module(inventory: Inventory, where: str, module: Any) -> None:
    contents = contents_of(module)
    for part in ("_parameters", "_buffers"):
        tensors = contents.get(part)
        if type(tensors) is not dict or tensors:
            for name, tensor in zip(*entries_of(tensors), strict=True):
                if tensor is not None:
                    count_tensor(inventory, name, tensor, owner=where)
    for part in contents.keys() - _OWN_PARTS:
        if inventory.kinds.of(type(contents.get(part))) != LEAF:
            count_part(inventory, part, contents.get(part), owner=where)
    for name, value in inventory.kinds.slots(module):
        count_part(inventory, name, value, owner=where)


def _join(path: str, name: str) -> str:
    if not path:
        return name
    return f"{path}.{name}" if name else path


def tree_of(root: Any, spared: Set[int] = frozenset()) -> tuple[list[str], list[Any]]:
    """List every module of a tree once, the root first, and its path in a second list.

    Without those that are spared, by their ids, and what only they lead to.
    """
    paths: list[str] = []
    modules: list[Any] = []
    seen: set[int] = set(spared)
    pending, their_paths = [root], [""]
    while pending:
        module, path = pending.pop(), their_paths.pop()
        if id(module) in seen or is_released(module):
            continue
        seen.add(id(module))
        modules.append(module)
        paths.append(path)
        names, children = children_of(module)
        pending += children
        their_paths += [_join(path, name if type(name) is str else "?") for name in names]
    return paths, modules


def children_of(module: Any) -> tuple[list[Any], list[Any]]:
    """List the names and the modules that a module contains."""
    contents = contents_of(module)
    names, children = entries_of(contents.get("_modules"))
    traced = contents.get("_actual_script_module")  # What torch.jit.trace puts a shell around.
    if traced is not None:
        names, children = [*names, ""], [*children, traced]
    torch = loaded_torch()
    if torch is None or all(issubclass(type(child), torch.nn.Module) for child in children):
        return names, children
    chosen = [i for i, c in enumerate(children) if issubclass(type(c), torch.nn.Module)]
    return [names[i] for i in chosen], [children[i] for i in chosen]
