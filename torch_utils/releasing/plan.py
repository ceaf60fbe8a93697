"""Plan a release: choose a target for each object.

All objects are examined before any is changed, so an unsupported object is refused while the
others are still intact.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch_utils._runtime import whole_torch
from torch_utils.releasing.faiss_indexes import FaissTarget
from torch_utils.releasing.internals import without_overrides
from torch_utils.releasing.modules import ClosableTarget, ModuleTarget, closes_of
from torch_utils.releasing.objects import (
    CONTAINERS,
    TARGETS,
    Kind,
    Kinds,
    Part,
    attributes_of,
    find_in_class,
    is_instance,
    is_released,
    module_of,
    name_of,
    package_of,
    parts_of,
)
from torch_utils.releasing.optimizers import TrainingTarget
from torch_utils.releasing.sharing import find_shared_submodules, tensors_of_others
from torch_utils.releasing.storages import Target
from torch_utils.releasing.tensors import TensorTarget

_TARGET_OF: dict[Kind, Any] = {
    Kind.MODULE: ModuleTarget,
    Kind.TENSOR: TensorTarget,
    Kind.TRAINING: TrainingTarget,
    Kind.INDEX: FaissTarget,
    Kind.RESOURCE: ClosableTarget,
}
_MAY_CLOSE = (Kind.OTHER, Kind.LIBRARY, Kind.RECORD, Kind.ITERATOR)


def check_kinds(objects: Sequence[Any], caller: str) -> None:
    """Check that `release` supports objects, without changing them.

    Args:
        objects: Objects to release later.
        caller: The function that the program called, for the message.

    Raises:
        TypeError: An object is not supported.
    """
    try:
        _Walk(is_again=False).run(objects)
    except TypeError as error:
        raise TypeError(f"{caller}{str(error).removeprefix('release()')}") from None


def plan(objects: Sequence[Any], *, is_again: bool = False) -> list[Target]:
    """Return a target for each object to release, in order, without changing the objects.

    Args:
        objects: The objects to release.
        is_again: Whether `check_kinds` has accepted the objects; some may be empty by now.

    Raises:
        TypeError: An object is not supported.
    """
    walk = _Walk(is_again)
    found = walk.run(objects)
    modules = [target for target in found if isinstance(target, ModuleTarget)]
    tensors = [target for target in found if isinstance(target, TensorTarget)]
    if modules:
        find_shared_submodules(modules)
    held = {id(t.thing): t.thing for t in tensors if id(t.thing) in walk.held_tensors}
    spared = tensors_of_others(held, walk.references, modules) if held else set()
    held.clear()
    for tensor in tensors:
        tensor.is_spared = id(tensor.thing) in spared
        tensor.references = walk.references[id(tensor.thing)]
    targets: list[Target] = []
    closed: set[int] = set()
    for target in found:
        if isinstance(target, ModuleTarget):
            targets += closes_of(target.tree, target.shared, closed)
        targets.append(target)
    return targets


class _Holder:
    """An object that is released for its attributes, if these hold something to release."""

    def __init__(self, thing: Any, name: str, kind: Kind) -> None:
        self.thing = thing
        self.name = name
        self.kind = kind
        self.is_taken = False


class _Walk:
    """A walk over objects and their parts, each once, without recursion.

    Attributes:
        references: The number of references to each tensor that the walk has met, by its id.
        held_tensors: The ids of tensors that an object holds and that the program did not pass.
            A live model may use them as well.
    """

    def __init__(self, is_again: bool) -> None:
        self._torch = whole_torch()
        self._kinds = Kinds(self._torch)
        self._is_again = is_again
        self._targets: dict[int, Target | None] = {}
        self._seen: dict[int, Any] = {}
        self._levels: list[tuple[Iterator[Part], _Holder | None]] = []
        self.references: defaultdict[int, int] = defaultdict(int)
        self.held_tensors: set[int] = set()

    def run(self, objects: Sequence[Any]) -> list[Target]:
        """Return a target for each object to release."""
        with without_overrides(self._torch):
            for thing in objects:
                self._look_at_named(thing, name_of(type(thing)), is_argument=True)
                while self._levels:
                    parts, holder = self._levels[-1]
                    part = next(parts, None)
                    if part is None:
                        self._levels.pop()
                        self._end(holder)
                    elif holder is None:
                        self._look_at_named(*part)
                    else:
                        self._look_at_held(*part, holder)
        self._seen.clear()
        return [target for target in self._targets.values() if target is not None]

    def _look_at_named(self, thing: Any, name: str, *, is_argument: bool = False) -> None:
        """Visit an object that the program passed, by itself or in a container; never skip it."""
        kind = self._kinds(thing)
        if thing is None or kind is Kind.RELEASED:
            return
        self.held_tensors.discard(id(thing))
        self.references[id(thing)] += 1
        if id(thing) in self._seen:
            return
        if kind in TARGETS:
            self._take(thing, name, kind, None)
        elif kind is Kind.HARMLESS:
            return
        elif kind in (Kind.LEAF, Kind.ARRAY) or _is_standard_stream(thing):
            if is_argument:
                raise _unknown(thing, name, kind)
        elif kind is Kind.CLOSABLE or (
            # The close may be an attribute of the instance, such as in a namespace.
            kind in _MAY_CLOSE and callable(attributes_of(thing).get("close"))
        ):
            self._seen[id(thing)] = thing
            self._targets[id(thing)] = ClosableTarget(thing, name)
        elif kind in CONTAINERS:
            self._enter(thing, name, None)
        elif kind in (Kind.OTHER, Kind.LIBRARY):
            self._enter(thing, name, _Holder(thing, name, kind))
        else:
            raise _unknown(thing, name, kind)

    def _look_at_held(self, thing: Any, name: str, holder: _Holder) -> None:
        """Visit a part of an object that the program passed; skip it if it is not supported."""
        kind = self._kinds(thing)
        if kind is Kind.RELEASED:
            holder.is_taken = True
            return
        self.references[id(thing)] += 1
        if id(thing) in self._seen:
            holder.is_taken = holder.is_taken or id(thing) in self._targets
            return
        if kind in TARGETS:
            self._take(thing, name, kind, holder)
        elif kind in CONTAINERS or (kind is Kind.LIBRARY and holder.kind is Kind.LIBRARY):
            self._enter(thing, name, holder)

    def _enter(self, thing: Any, name: str, holder: _Holder | None) -> None:
        self._seen[id(thing)] = thing
        self._levels.append((parts_of(thing, name, self._kinds), holder))

    def _take(self, thing: Any, name: str, kind: Kind, holder: _Holder | None) -> None:
        if kind is Kind.TENSOR:
            torch: Any = self._torch
            if torch.Tensor.is_nested.__get__(thing):
                if holder is None:
                    raise _unknown(thing, name, kind)
                return
            if holder is not None:
                self.held_tensors.add(id(thing))
        elif kind is not Kind.RESOURCE:
            name = name_of(type(thing))
        if holder is not None:
            holder.is_taken = True
        self._seen[id(thing)] = thing
        self._targets[id(thing)] = _TARGET_OF[kind](thing, name)
        if kind is Kind.TRAINING and package_of(type(thing)) == "accelerate":
            inner = attributes_of(thing).get("optimizer")  # The wrapper has no state.
            if self._kinds(inner) is Kind.TRAINING and id(inner) not in self._seen:
                self._take(inner, name, Kind.TRAINING, holder)

    def _end(self, holder: _Holder | None) -> None:
        """Refuse an object if none of its parts can be released."""
        if holder is None or (self._levels and self._levels[-1][1] is holder):
            return
        accepted = holder.is_taken or self._is_again or holder.kind is Kind.LIBRARY
        if not accepted and not is_released(holder.thing):
            raise self._refusal(holder.thing, holder.name)

    def _refusal(self, thing: Any, name: str) -> TypeError:
        """Return the error for an object that holds nothing to release."""
        advice = "pass the models and tensors that it uses, or add a close() method"
        computed = [n for n in _USUAL_NAMES if find_in_class(type(thing), n) is not None]
        if computed:
            advice = f"pass {name}.{computed[0]}"
        elif find_in_class(type(thing), "__getattr__") is not None:
            advice = "it may be a proxy: pass the object behind it, or pass close= to manage()"
        return _error(thing, name, advice)


_USUAL_NAMES = ("model", "module", "encoder", "transformer", "pipeline", "network", "net")
_ADVICE = {
    Kind.ITERATOR: "it can be read only once, and reading it runs its code: pass list(...) of it, "
    "or the model itself",
    Kind.AWAITED: "its close() has to be awaited: await it, or pass it to callback() of an "
    "`async with` scope",
    Kind.STORAGE: "pass the tensor that it belongs to",
    Kind.ARRAY: "the last reference to an array keeps its memory: use `del`",
    Kind.TENSOR: "it is a nested tensor, which cannot be emptied in place: use `del`",
}
_qualname_of = type.__dict__["__qualname__"].__get__


def _unknown(thing: Any, name: str, kind: Kind) -> TypeError:
    """Return the error for an object of an unsupported kind."""
    is_class = kind is Kind.LEAF and is_instance(thing, type)
    return _error(
        thing, name, "it is a class: pass an instance" if is_class else _ADVICE.get(kind, "")
    )


def _error(thing: Any, name: str, advice: str) -> TypeError:
    kind = f"{module_of(type(thing))}.{_qualname_of(type(thing))}"
    what = f"release() does not support {name} ({kind})"
    takes = (
        "it supports modules, tensors, optimizers, faiss indexes, containers of these, and objects "
        "that hold them or have close(). Nothing was released"
    )
    return TypeError("; ".join(filter(None, (what, advice, takes))))


def _is_standard_stream(thing: Any) -> bool:
    names = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    return any(thing is getattr(sys, name, None) for name in names)
