"""What a release will do, object by object.

First everything is understood, then everything is counted, and only then touched: an object
of an unknown kind is refused while all the others are still whole. None of the program's code
runs meanwhile; see `kinds` and `parts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch_utils._releasing import refusals
from torch_utils._releasing.classes import ByClass, bases_of, is_among, name_of, package_of
from torch_utils._releasing.closables import ClosableTarget
from torch_utils._releasing.faiss_indexes import FaissTarget
from torch_utils._releasing.kinds import TARGETS, Kind, is_standard_stream, kind_of
from torch_utils._releasing.modules import ModuleTarget
from torch_utils._releasing.optimizers import OptimizerTarget
from torch_utils._releasing.own_cleanup import own_cleanups
from torch_utils._releasing.parts import attributes_of, keys_of, parts_of
from torch_utils._releasing.sharing import parameters_of_others, spare_shared
from torch_utils._releasing.target import Target
from torch_utils._releasing.tensors import TensorsTarget, TensorTarget
from torch_utils._releasing.tombstone import is_released
from torch_utils._releasing.weak_storages import plain_tensors
from torch_utils._runtime import whole_torch


def check_kinds(objects: Sequence[Any], caller: str) -> None:
    """Refuse objects of a kind that nobody here knows how to release, without touching any.

    Args:
        objects: What is to be released one day.
        caller: What the program called, for the message.

    Raises:
        TypeError: There is one.
    """
    try:
        _Walk(whole_torch(), False).run(objects)
    except TypeError as error:
        raise TypeError(f"{caller}{str(error).removeprefix('release()')}") from None


def plan(objects: Sequence[Any], *, again: bool = False) -> list[Target]:
    """Say how each object will be released, in order, without touching any.

    Args:
        objects: What to release.
        again: The objects were accepted before, and the program may have emptied some since.

    Raises:
        TypeError: An object is of a kind that nobody here knows how to release.
    """
    walk = _Walk(whole_torch(), again)
    found = walk.run(objects)
    modules = [target for target in found if isinstance(target, ModuleTarget)]
    if modules:
        spare_shared(modules)
    if walk.held_parameters:
        spared = parameters_of_others(walk.held_parameters, modules)
        for target in found:
            target.spare(spared)
    targets: list[Target] = []
    cleaned: set[tuple[int, str]] = set()
    for target in found:
        if isinstance(target, ModuleTarget) and target.tree is not None and target.tree.modules:
            targets.extend(own_cleanups(target.tree, target.shared, cleaned))
        targets.append(target)
    return targets


class _Holder:
    """An object that is taken for what it holds, if it holds something."""

    def __init__(self, thing: Any, name: str, kind: Kind) -> None:
        self.thing = thing
        self.name = name
        self.kind = kind
        self.is_taken = False


class _Step(NamedTuple):
    """One object to look at: named by the program, or an attribute of a holder."""

    thing: Any
    name: str
    holder: _Holder | None
    is_argument: bool = False


class _Run(NamedTuple):
    """Tensors that follow each other, to look at in steps of C; there may be thousands."""

    tensors: list[Any]
    names: list[str]
    holder: _Holder | None


class _Walk:
    """A walk over the objects and what they consist of, each once; without recursion."""

    def __init__(self, torch: Any, again: bool) -> None:
        self._torch = torch
        self._again = again
        self._kinds = ByClass(lambda kind: kind_of(kind, torch))
        self._seen: set[int] = set()
        self._taken: set[int] = set()
        self._plain = frozenset(map(id, plain_tensors(torch)))
        self._pending: list[_Step | _Run | _Holder] = []
        self._targets: list[Target] = []
        self.held_parameters: set[int] = set()
        """Those that nobody named, but an object that holds them: they may be a live model's."""

    def run(self, objects: Sequence[Any]) -> list[Target]:
        """Plan all of them."""
        names = [name_of(type(thing)) for thing in objects]
        self._push(list(objects), names, None, are_arguments=True)
        torch = self._torch
        if torch is None:
            self._walk()
        else:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                self._walk()
        return self._targets

    def _walk(self) -> None:
        pending = self._pending
        while pending:
            step = pending.pop()
            if isinstance(step, _Run):
                self._take_run(step)
            elif isinstance(step, _Step):
                self._look_at(step)
            else:
                self._end(step)

    def kind(self, thing: Any) -> Kind:
        """Say of what kind an object is."""
        return self._kinds(type(thing))

    def _push(
        self,
        things: list[Any],
        names: list[str],
        holder: _Holder | None,
        *,
        are_arguments: bool = False,
    ) -> None:
        """Have things looked at next, in their order."""
        steps: list[_Step | _Run] = []
        are_plain = list(map(self._plain.__contains__, map(id, map(type, things))))
        for is_plain, run in groupby(range(len(things)), are_plain.__getitem__):
            numbers = list(run)
            if is_plain:
                some = slice(numbers[0], numbers[-1] + 1)
                steps.append(_Run(things[some], names[some], holder))
            else:
                steps += [_Step(things[n], names[n], holder, are_arguments) for n in numbers]
        self._pending += reversed(steps)

    def _take_run(self, run: _Run) -> None:
        """Take all of them, or look at each if one of them may not be taken."""
        tensors, names, holder = run
        keys = list(map(id, tensors))
        are_new = self._seen.isdisjoint(keys) and len(set(keys)) == len(keys)
        if not are_new or any(map(self._torch.Tensor.is_nested.__get__, tensors)):
            steps = [_Step(t, n, holder) for t, n in zip(tensors, names, strict=True)]
            self._pending += reversed(steps)
            return
        self._seen.update(keys)
        self._taken.update(keys)
        if holder is not None:
            holder.is_taken = True
            self._note_parameters(tensors)
        self._take_tensors(tensors, names)

    def _note_parameters(self, tensors: Sequence[Any]) -> None:
        kind = self._torch.nn.Parameter
        self.held_parameters.update(id(t) for t in tensors if is_among(kind, bases_of(type(t))))

    def _take_tensors(self, tensors: list[Any], names: list[str]) -> None:
        last = self._targets[-1] if self._targets else None
        if isinstance(last, TensorsTarget):
            last.add(tensors, names)
        else:
            self._targets.append(TensorsTarget(tensors, names))

    def _look_at(self, step: _Step) -> None:
        thing, holder = step.thing, step.holder
        if thing is None:
            return
        if holder is None:
            self.held_parameters.discard(id(thing))
        if is_released(thing) or id(thing) in self._seen:
            if holder is not None and (is_released(thing) or id(thing) in self._taken):
                holder.is_taken = True
            return
        kind = self.kind(thing)
        if is_released(thing):
            return  # By another thread, just now.
        if kind is Kind.LEAF:
            if step.is_argument:
                raise refusals.unknown(step.thing, step.name, kind)
            return
        self._seen.add(id(thing))
        if kind in TARGETS:
            self._take(step, kind)
        elif holder is None:
            self._look_at_named(step, kind)
        elif kind in (Kind.MAPPING, Kind.ITEMS, Kind.RECORD, Kind.ARRAY) or (
            kind is Kind.LIBRARY and holder.kind is Kind.LIBRARY
        ):
            self._enter(step, kind, holder)

    def _look_at_named(self, step: _Step, kind: Kind) -> None:
        """Look at what the program named, by itself or in a container; it is never passed over."""
        thing = step.thing
        if kind is Kind.CLOSABLE or (kind in _MAY_CLOSE and _closes_itself(thing)):
            if is_standard_stream(thing):
                if step.is_argument:
                    raise refusals.unknown(thing, step.name, Kind.LEAF)
                return
            self._targets.append(ClosableTarget(thing, step.name))
        elif kind in (Kind.MAPPING, Kind.ITEMS, Kind.RECORD):
            self._enter(step, kind, None)
        elif kind is Kind.ARRAY:
            parts, _ = parts_of(thing, step.name, kind)
            if step.is_argument and not parts:
                raise refusals.unknown(thing, step.name, kind)
            self._enter(step, kind, None)
        elif kind in _HOLDERS:
            holder = _Holder(thing, step.name, kind)
            self._pending.append(holder)
            self._enter(step, kind, holder)
        elif kind is not Kind.HARMLESS:
            raise refusals.unknown(thing, step.name, kind)

    def _enter(self, step: _Step, kind: Kind, holder: _Holder | None) -> None:
        parts, names = parts_of(step.thing, step.name, kind)
        self._push(parts, names, holder)
        if kind is Kind.MAPPING:
            # A model may be a key, but any object may: what else is one is passed over.
            owner = holder or _Holder(step.thing, step.name, Kind.OPAQUE)
            keys = keys_of(step.thing, step.name)
            self._pending.extend(_Step(key, name, owner) for key, name in keys)

    def _take(self, step: _Step, kind: Kind) -> None:
        if kind is Kind.TENSOR and refusals.is_nested(self._torch, step.thing):
            if step.holder is None:
                raise refusals.unknown(step.thing, step.name, kind)
            return
        self._taken.add(id(step.thing))
        if step.holder is not None:
            step.holder.is_taken = True
            if kind is Kind.TENSOR:
                self._note_parameters([step.thing])
        if id(type(step.thing)) in self._plain:
            self._take_tensors([step.thing], [step.name])
            return
        self._targets.append(_TARGET_OF[kind](step.thing, _name_of(step, kind)))
        if kind is Kind.TRAINING and package_of(type(step.thing)) == "accelerate":
            inner = attributes_of(step.thing).get("optimizer")  # Its wrapper has no state.
            if self.kind(inner) is Kind.TRAINING:
                self._pending.append(_Step(inner, step.name, step.holder))

    def _end(self, holder: _Holder) -> None:
        """Refuse an object that has been passed without finding anything in it."""
        accepted = holder.is_taken or self._again or holder.kind is Kind.LIBRARY
        if not accepted and not is_released(holder.thing):
            raise refusals.empty(holder.thing, holder.name, self.kind)


_HOLDERS = (Kind.OPAQUE, Kind.LIBRARY, Kind.DATASET, Kind.RECORD)
_MAY_CLOSE = (*_HOLDERS, Kind.ONCE)
_TARGET_OF: dict[Kind, Any] = {
    Kind.MODULE: ModuleTarget,
    Kind.TENSOR: TensorTarget,
    Kind.TRAINING: OptimizerTarget,
    Kind.INDEX: FaissTarget,
    Kind.RESOURCE: ClosableTarget,
}


def _name_of(step: _Step, kind: Kind) -> str:
    return step.name if kind in (Kind.TENSOR, Kind.RESOURCE) else name_of(type(step.thing))


def _closes_itself(thing: Any) -> bool:
    """Say whether an instance has a ``close`` of its own, as a namespace may."""
    return callable(attributes_of(thing).get("close"))
