"""How each kind of object gives up what it holds, in place.

First everything is understood, then everything is counted, and only then touched: an object
of an unknown kind is refused while all the others are still whole.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from torch_utils._releasing.closables import ClosableTarget
from torch_utils._releasing.faiss_indexes import FaissTarget, is_index
from torch_utils._releasing.modules import ModuleTarget
from torch_utils._releasing.optimizers import OptimizerTarget
from torch_utils._releasing.sharing import spare_shared
from torch_utils._releasing.target import Target
from torch_utils._releasing.tensors import TensorTarget
from torch_utils._releasing.tombstone import is_released
from torch_utils._runtime import loaded_torch
from torch_utils.resource import Resource

_SCALARS = (str, bytes, bytearray, int, float, complex)


def plan(objects: Sequence[Any]) -> list[Target]:
    """Say how each object will be released, in order, without touching any.

    Raises:
        TypeError: An object is of a kind that nobody here knows how to release.
    """
    targets: list[Target] = []
    seen: set[int] = set()
    for thing in objects:
        if isinstance(thing, _SCALARS):
            raise _unknown(thing, type(thing).__name__)
        targets.extend(_plan(thing, type(thing).__name__, seen))
    modules = [target for target in targets if isinstance(target, ModuleTarget)]
    if modules:
        spare_shared(modules)
    return targets


def _plan(thing: Any, name: str, seen: set[int]) -> Iterator[Target]:
    """Plan one object; what a container holds is planned one by one, each object once."""
    if thing is None or id(thing) in seen or is_released(thing) or isinstance(thing, _SCALARS):
        return
    seen.add(id(thing))
    target = None if isinstance(thing, Resource) else _target_of_library(thing, name)
    if target is not None:
        yield target
    elif callable(getattr(thing, "close", None)) and not isinstance(thing, type):
        yield ClosableTarget(thing, name)
    elif isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield from _plan(value, f"{name}[{key!r}]", seen)
    elif isinstance(thing, (Sequence, Set, deque)):
        for index, value in enumerate(list(thing)):
            yield from _plan(value, f"{name}[{index}]", seen)
    else:
        raise _unknown(thing, name)


def _target_of_library(thing: Any, name: str) -> Target | None:
    if is_index(thing):
        return FaissTarget(thing, type(thing).__name__)
    torch = loaded_torch()
    if torch is None:
        return None
    if isinstance(thing, torch.nn.Module):
        return ModuleTarget(thing, type(thing).__name__)
    # A nested tensor keeps its sizes when its data are swapped, and would then read beyond them.
    if isinstance(thing, torch.Tensor) and not thing.is_nested:
        return TensorTarget(thing, name)
    optim = sys.modules.get("torch.optim")
    if optim is not None and isinstance(thing, optim.Optimizer):
        return OptimizerTarget(thing, type(thing).__name__)
    return None


def _unknown(thing: Any, name: str) -> TypeError:
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    return TypeError(
        f"release() does not know how to give up {name} (a {kind}); it takes modules, tensors, "
        "optimizers, faiss indexes, containers of these, and objects with close(). Nothing was "
        "released"
    )
