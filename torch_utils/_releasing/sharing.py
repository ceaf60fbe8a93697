"""Which submodules a live model contains too, and a release must leave whole."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch_utils._releasing.modules import walk


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
