"""Modules: empty a whole tree of them in place, and spare what a live model shares.

Weights are shared in two ways. Two modules may hold the same Parameter: each then loses only
its own reference. Or two models may contain the same submodule: that one is left whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_utils._releasing.pages import LARGE_BYTES, drop_pages
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tensors import count_contents, count_tensor
from torch_utils._releasing.tombstone import bury, is_released
from torch_utils._runtime import loaded_torch


class ModuleTarget(Target):
    """A module and what it contains."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name)
        self.module = module
        self.shared: set[int] = set()
        self._tree: list[tuple[str, Any]] = []

    def count(self, inventory: Inventory) -> None:
        # Once found out which parts are shared, for whoever refers to a part counts as a sharer.
        self._tree = list(walk(self.module, self.shared))
        for path, module in self._tree:
            where = _join(self.name, path)
            contents = vars(module)
            for part in ("_parameters", "_buffers"):
                tensors = contents.get(part)
                if tensors:
                    for name, tensor in list(tensors.items()):
                        if tensor is not None:
                            count_tensor(inventory, f"{where}.{name}", tensor)
            for part in contents.keys() - _OWN_PARTS:
                if type(contents[part]) not in _COUNTLESS and not part.startswith("_"):
                    count_contents(inventory, f"{where}.{part}", contents[part], depth=2)

    def give_up(self, place: str) -> None:
        torch = loaded_torch()
        for path, module in self._tree:
            if is_released(module):
                continue  # Named twice: with a model and by itself.
            _drop_one_by_one(torch, module)
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
_COUNTLESS = (bool, int, float, str, type(None))


def _join(path: str, name: str) -> str:
    if not path:
        return name
    return f"{path}.{name}" if name else path


def _drop_one_by_one(torch: Any, module: Any) -> None:
    """Drop a module's tensors, each in a step of its own.

    Between two steps other threads get their turn, which they do not while a dictionary that
    holds a gigabyte is cleared.
    """
    plain = (torch.Tensor, torch.nn.Parameter)
    for part in ("_parameters", "_buffers"):
        tensors = vars(module).get(part)
        if not isinstance(tensors, dict):
            continue  # A scripted module's, which only shows what its C++ object holds.
        for name in list(tensors):
            tensor = tensors.pop(name)
            # By exact type: a lazy layer's parameter, say, cannot be asked for its size.
            if type(tensor) in plain and tensor.numel() * tensor.itemsize >= LARGE_BYTES:
                drop_pages(torch, tensor)
            del tensor


def walk(root: Any, spared: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield every module of a tree once, with its path; not below those that are spared."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen or id(module) in spared or is_released(module):
            continue
        seen.add(id(module))
        yield path, module
        for name, child in _children(module):
            pending.append((_join(path, name), child))


def _children(module: Any) -> list[tuple[str, Any]]:
    contents = object.__getattribute__(module, "__dict__")
    children = contents.get("_modules")
    found = [(n, c) for n, c in children.items() if c is not None] if children else []
    traced = contents.get("_actual_script_module")  # What torch.jit.trace puts a shell around.
    return found if traced is None else [*found, ("", traced)]
