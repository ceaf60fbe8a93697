"""Modules: empty a whole tree of them in place, and spare what a live model shares.

Weights are shared in two ways. Two modules may hold the same Parameter: each then loses only
its own reference. Or two models may contain the same submodule: that one is left whole.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_utils._runtime import DEBUG, loaded_torch, log
from torch_utils._steps import Step, count_contents, count_tensor
from torch_utils._storages import Inventory
from torch_utils._tombstone import bury, is_released
from torch_utils._unmap import LARGE_BYTES, drop_pages


class ModuleStep(Step):
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
        self._run_own_cleanup()
        torch = loaded_torch()
        for path, module in self._tree:
            if is_released(module):
                continue  # Named twice: with a model and by itself.
            _drop_one_by_one(torch, module)
            kind = type(module).__name__
            what = f"this {kind}" if not path else f"{path!r} of {self.name} (a {kind})"
            bury(module, what, place)

    def _run_own_cleanup(self) -> None:
        """Call the module's ``close`` and destructor while there is still something to clean."""
        for name in ("close", "__del__"):
            method: Callable[..., Any] | None = getattr(type(self.module), name, None)
            if method is None:
                continue
            try:
                method(self.module)
            except Exception as error:
                # The program's own code, run on the way to giving its memory back: it must not
                # keep that from happening.
                log(DEBUG, "%s.%s() before its release: %r", self.name, name, error)


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


def find_shared(roots: Sequence[Any]) -> set[int]:
    """Find the submodules that a model outside these trees contains too, by their ids.

    Counting references answers for most models, at no cost that grows with the heap. Only a
    submodule that somebody else refers to makes the garbage collector look for a module among
    those who do; a variable, a list or a hook does not count as sharing.
    """
    places, registries = _places(roots)
    for root in roots:
        places.pop(id(root), None)  # Asked for by name: not spared.
    suspects = [found[0] for found in places.values() if _has_others(found)]
    return {id(s) for s in suspects if _is_in_another_module(s, registries)}


def _places(roots: Sequence[Any]) -> tuple[dict[int, list[Any]], set[int]]:
    """List each submodule as often as the trees contain it, and the dictionaries they are in.

    A function of its own: when it has returned, no loop variable refers to a module any more.
    """
    places: dict[int, list[Any]] = {}
    registries: set[int] = set()
    for root in roots:
        for _, module in walk(root, set()):
            registry = vars(module).get("_modules") or {}
            if id(registry) in registries:
                continue
            registries.add(id(registry))
            for child in registry.values():
                if child is not None:
                    places.setdefault(id(child), []).append(child)
    return places, registries


def _has_others(found: list[Any]) -> bool:
    """Whether there are references beyond one per place, one per entry here, and the call's."""
    return sys.getrefcount(found[0]) > 2 * len(found) + 1


def _is_in_another_module(module: Any, registries: set[int]) -> bool:
    for referrer in gc.get_referrers(module):
        if type(referrer) is not dict or id(referrer) in registries:
            continue
        if any(_is_registry_of(owner, referrer) for owner in gc.get_referrers(referrer)):
            return True
    return False


def _is_registry_of(owner: Any, registry: dict[Any, Any]) -> bool:
    """Whether a dictionary is the ``_modules`` of an owner: a module, or a module's ``__dict__``.

    `type` rather than `isinstance` decides, which asks foreign objects for their ``__class__``.
    """
    if type(owner) is dict:
        return owner.get("_modules") is registry
    contents = getattr(owner, "__dict__", None) if hasattr(type(owner), "named_modules") else None
    return contents is not None and contents.get("_modules") is registry
