"""Why `release` refuses an object, and what to pass instead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch_utils._releasing.classes import isinstance_of, module_of
from torch_utils._releasing.kinds import TARGETS, Kind, find
from torch_utils._releasing.parts import parts_of

_MOST = 20_000  # objects that are passed to find out what would have been right
_FOLLOWED = frozenset(
    (Kind.MAPPING, Kind.ITEMS, Kind.RECORD, Kind.LIBRARY, Kind.OPAQUE, Kind.CLOSABLE)
)
_ADVICE = {
    Kind.ONCE: "it can be read only once, and reading it runs its code: pass list(...) of it, or "
    "the model itself",
    Kind.AWAITED: "its close() has to be awaited: do that, or hand it to callback() of an "
    "`async with` scope",
    Kind.STORAGE: "pass the tensor that it belongs to",
    Kind.ARRAY: "the memory of an array goes with the last reference to it: use `del`",
    Kind.TENSOR: "it is a nested tensor, which cannot be emptied in place: use `del`",
}
_qualname = type.__dict__["__qualname__"].__get__
_USUAL_NAMES = ("model", "module", "encoder", "transformer", "pipeline", "network", "net")


def unknown(thing: Any, name: str, kind: Kind) -> TypeError:
    """Make the error for an object of a kind that is not taken."""
    advice = _ADVICE.get(kind, "")
    if kind is Kind.LEAF and isinstance_of(thing, type):
        advice = "it is a class: pass an instance"
    return _error(thing, name, advice)


def empty(thing: Any, name: str, kind_of: Callable[[Any], Kind]) -> TypeError:
    """Make the error for an object that itself holds nothing that could be given up."""
    nearest = _nearest(thing, name, kind_of)
    if nearest:
        return _error(thing, name, f"it does not reach into its parts; pass {nearest}")
    computed = [n for n in _USUAL_NAMES if find(type(thing), n) is not None]
    if computed:
        return _error(thing, name, f"pass {name}.{computed[0]}")
    if find(type(thing), "__getattr__") is not None:
        advice = "it may stand for something else: pass that, or name its close in manage()"
        return _error(thing, name, advice)
    return _error(thing, name, "pass the models and tensors that it uses, or give it a close()")


def is_nested(torch: Any, tensor: Any) -> bool:
    """Say whether a tensor is a nested one, without asking a subclass's own code."""
    return bool(torch.Tensor.is_nested.__get__(tensor))


def _nearest(thing: Any, name: str, kind_of: Callable[[Any], Kind]) -> str:
    """Find the way to the nearest thing that would be taken."""
    pending = deque([(thing, name)])
    seen: set[int] = set()
    while pending and len(seen) < _MOST:
        part, path = pending.popleft()
        if id(part) in seen or part is None:
            continue
        seen.add(id(part))
        kind = kind_of(part)
        if kind in TARGETS:
            return path
        if kind in _FOLLOWED:
            pending.extend(zip(*parts_of(part, path, kind), strict=True))
    return ""


def _error(thing: Any, name: str, advice: str) -> TypeError:
    kind = f"{module_of(type(thing))}.{_qualname(type(thing))}"
    what = f"release() does not know how to give up {name} (a {kind})"
    takes = (
        "it takes modules, tensors, optimizers, faiss indexes, containers of these, and objects "
        "with close() or that hold them. Nothing was released"
    )
    return TypeError("; ".join(filter(None, (what, advice, takes))))
