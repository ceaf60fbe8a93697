"""Plan a release: which objects are emptied, which are let go, and which stay.

All objects are examined before any is changed, so an unsupported object is refused while the
others are still intact. Three rules apply, in this order:

1. What the caller passes, also inside a list, tuple, set or dictionary, is emptied in place.
2. A tensor that it merely contains is let go, never emptied: other references keep it.
3. A module, optimizer or index that it contains is emptied too, unless an object outside refers to
   it. `sharing` finds these.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch_utils._runtime import whole_torch
from torch_utils.releasing.objects import (
    CONTAINERS,
    TARGETS,
    Kind,
    Kinds,
    Part,
    attributes_of,
    find_in_class,
    is_among,
    is_instance,
    module_of,
    name_of,
    package_of,
    parts_of,
)
from torch_utils.releasing.sharing import reachable, used_by_others
from torch_utils.releasing.storages import without_overrides
from torch_utils.releasing.targets import CLAIMS, TARGET_OF, CloseTarget, HolderTarget, Target

_HOLDERS = (Kind.OTHER, Kind.LIBRARY, Kind.RECORD)
_MAY_CLOSE = (*_HOLDERS, Kind.ITERATOR)


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
        text = str(error).removeprefix("release()").replace(_UNCHANGED, _OR_CLOSE)
        raise TypeError(f"{caller}{text}") from None


def plan(objects: Sequence[Any], *, is_again: bool = False) -> list[Target]:
    """Return a target for each object to release, in order, without changing the objects.

    Args:
        objects: The objects to release.
        is_again: Whether an earlier walk has accepted the objects; some may be empty by now.

    Raises:
        TypeError: An object is not supported.
    """
    walk = _Walk(is_again)
    targets = walk.run(objects)
    walk.named.clear()  # Its references would not be explained.
    spared = used_by_others(targets, walk.containers, walk.references)
    claims, thread = list(CLAIMS.items()), get_ident()
    # What this thread has destroyed is emptied. What another one is releasing is left to it.
    spared -= {key for key, claim in claims if claim.thread == thread and "__del__" in claim.called}
    closing = [claim.thing for _, claim in claims if claim.thread != thread]
    busy = reachable(closing)[0].keys() if closing else frozenset()
    unsearched = walk.unsearched()
    spared |= {id(target.thing) for target in unsearched}
    targets += unsearched
    for target in targets:
        target.spare(spared | busy)
        target.stays |= id(target.thing) in busy
    return targets


def contents_to_measure(thing: Any) -> tuple[list[Target], list[Any]]:
    """Return targets for what an object holds, also in resources, and the containers it holds."""
    walk = _Walk(is_again=True, enters_resources=True)
    targets = walk.run([thing])
    return targets + walk.unsearched(), [*walk.named.values(), *walk.containers.values()]


@dataclass
class _Level:
    """An object whose parts are being visited.

    Attributes:
        parts: The parts that remain.
        holder: The object, if only its attributes are searched; None for a container that the
            caller passed.
        is_found: Whether it leads to something that can be released.
        unsearched: The first attribute that was not understood.
    """

    parts: Iterator[Part]
    holder: Part | None
    kind: Kind
    is_found: bool = False
    unsearched: Part | None = None


class _Walk:
    """A walk over objects and their parts, each once, without recursion.

    Attributes:
        named: The containers that the caller passed, by their ids.
        containers: The containers that an object holds, by their ids.
        references: The number of references to each contained object that the walk has met.
    """

    def __init__(self, is_again: bool, *, enters_resources: bool = False) -> None:
        self._torch: Any = whole_torch()
        self._kinds = Kinds(self._torch)
        self._is_again = is_again
        self._enters_resources = enters_resources
        self._targets: dict[int, Target] = {}
        self.named: dict[int, Any] = {}
        self._levels: list[_Level] = []
        self._problem: TypeError | None = None
        self._skipped: list[Part] = []  # objects in objects
        self.containers: dict[int, Any] = {}
        self.references: Counter[int] = Counter()

    def run(self, objects: Sequence[Any]) -> list[Target]:
        """Return a target for each object to release."""
        with without_overrides(self._torch):
            for thing in objects:
                self._problem = None
                self._levels = [_Level(iter([(thing, name_of(type(thing)))]), None, Kind.ITEMS)]
                while True:
                    level = self._levels[-1]
                    part = next(level.parts, None)
                    if part is None and len(self._levels) == 1:
                        break
                    if part is None:
                        self._end(self._levels.pop(), self._levels[-1])
                    elif level.holder is None:
                        self._look_at_named(*part)
                    else:
                        self._look_at_held(*part, level)
                # Unsupported objects beside a supported one are skipped.
                if self._problem is not None and not level.is_found and not self._is_again:
                    raise self._problem
        return list(self._targets.values())

    def unsearched(self) -> list[Target]:
        """Return the modules and tensors in the attributes of objects that were not searched.

        They stay, so the report says that they are still held.
        """
        kept: dict[int, Target] = {}
        for one in self._skipped:
            for part, name in parts_of(*one, self._kinds):
                kind = self._kinds(part)
                if kind in (Kind.MODULE, Kind.TENSOR) and id(part) not in self._targets:
                    kept[id(part)] = TARGET_OF[kind](part, name, is_named=False)
        return list(kept.values())

    def _look_at_named(self, thing: Any, name: str) -> None:
        """Visit an object that the caller passed, by itself or in a container."""
        kind, level = self._kinds(thing), self._levels[-1]
        if thing is None or kind in (Kind.RELEASED, Kind.HARMLESS):
            level.is_found = True
        elif (known := self._targets.get(id(thing))) is not None:
            known.is_named = True
            level.is_found |= type(known) is not HolderTarget
        elif kind in TARGETS:
            self._take(thing, name, kind, is_named=True)
        elif kind in (Kind.LEAF, Kind.ARRAY) or _is_standard_stream(thing):
            if len(self._levels) == 1:
                self._refuse(_unknown(thing, name, kind))
        elif kind is Kind.CLOSABLE or (
            # The close may be an attribute of the instance, such as in a namespace.
            kind in _MAY_CLOSE
            and self._kinds(close := attributes_of(thing).get("close")) not in TARGETS
            and callable(close)
        ):
            self._targets[id(thing)] = CloseTarget(thing, name, is_named=True)
            level.is_found = True
            self._enter(thing, name, Kind.CLOSABLE)
        elif kind in _HOLDERS:
            self._enter(thing, name, kind)
        elif kind in CONTAINERS:
            if id(thing) not in self.named:
                self.named[id(thing)] = thing
                self._levels.append(_Level(parts_of(thing, name, self._kinds), None, kind))
        else:
            self._refuse(_unknown(thing, name, kind))

    def _look_at_held(self, thing: Any, name: str, level: _Level) -> None:
        """Visit a part of an object that the caller passed; skip it if it is not supported."""
        kind = self._kinds(thing)
        if kind is Kind.RELEASED:
            level.is_found = True
            return
        if level.holder is None or type(level.holder[0]) is not MappingProxyType:
            self.references[id(thing)] += 1  # Those of a proxy are its dictionary's.
        if (known := self._targets.get(id(thing))) is not None:
            level.is_found |= type(known) is not HolderTarget
        elif kind in TARGETS:
            if kind is not Kind.TENSOR or not self._torch.Tensor.is_nested.__get__(thing):
                self._take(thing, name, kind, is_named=False)
        elif kind in CONTAINERS and kind is not Kind.RECORD:
            if id(thing) not in self.containers and id(thing) not in self.named:
                self.containers[id(thing)] = thing
                parts = parts_of(thing, name, self._kinds)
                self._levels.append(_Level(parts, (thing, name), kind))
        elif kind in (Kind.LIBRARY, Kind.RECORD):
            self._enter(thing, name, kind, is_named=False)
        elif kind in (Kind.OTHER, Kind.CLOSABLE, Kind.AWAITED):
            level.unsearched = level.unsearched or (thing, name)
            self._skipped.append((thing, name))

    def _enter(self, thing: Any, name: str, kind: Kind, *, is_named: bool = True) -> None:
        """Search an object's attributes, and let go of the tensors in them."""
        holder = HolderTarget(thing, name, is_named=is_named)
        # An object with a close() has two targets.
        self._targets.setdefault(id(holder) if kind is Kind.CLOSABLE else id(thing), holder)
        parts = parts_of(thing, name, self._kinds)
        self._levels.append(_Level(parts, (thing, name), kind))

    def _take(self, thing: Any, name: str, kind: Kind, *, is_named: bool) -> None:
        if kind is Kind.TENSOR and is_named and self._torch.Tensor.is_nested.__get__(thing):
            self._refuse(_unknown(thing, name, kind))
            return
        if kind not in (Kind.TENSOR, Kind.RESOURCE):
            name = name_of(type(thing))
        self._levels[-1].is_found = True
        self._targets[id(thing)] = TARGET_OF[kind](thing, name, is_named=is_named)
        if kind is Kind.RESOURCE and self._enters_resources:
            self._enter(thing, name, Kind.CLOSABLE, is_named=is_named)
        if kind is Kind.TRAINING and package_of(type(thing)) == "accelerate":
            for inner in attributes_of(thing).values():  # The wrapper has no state.
                if self._kinds(inner) is Kind.TRAINING and id(inner) not in self._targets:
                    self._take(inner, name, Kind.TRAINING, is_named=is_named)

    def _end(self, level: _Level, outer: _Level) -> None:
        """Pass on what was found; refuse an object if none of its parts can be released."""
        if level.holder is not None and not level.is_found:
            # Its model may not be loaded yet, or no longer.
            parts = attributes_of(level.holder[0]).values()
            level.is_found = level.unsearched is None and is_among(None, parts)
            if not level.is_found and level.kind is not Kind.CLOSABLE and outer.holder is None:
                self._refuse(_refusal(*level.holder, level.unsearched))
        outer.is_found |= level.is_found

    def _refuse(self, problem: TypeError) -> None:
        self._problem = self._problem or problem


def _refusal(thing: Any, name: str, unsearched: Part | None) -> TypeError:
    """Return the error for an object that holds nothing to release."""
    advice = "Pass its models or tensors, or give it a close() method"
    computed = [n for n in _USUAL_NAMES if find_in_class(type(thing), n) is not None]
    if computed:
        advice = f"Pass {name}.{computed[0]}"
    elif unsearched is not None:
        advice = f"Pass {unsearched[1]}, a {name_of(type(unsearched[0]))} that is not searched"
    elif find_in_class(type(thing), "__getattr__") is not None:
        advice = "It may be a proxy: pass the object behind it, or pass close= to manage()"
    return _error(thing, advice)


_UNCHANGED = "Nothing was changed."
_OR_CLOSE = "Or pass it to manage() with a function as close=."
_USUAL_NAMES = ("model", "module", "encoder", "transformer", "pipeline", "network", "net")
_ADVICE = {
    Kind.ITERATOR: "It can be read only once, and reading it runs its code: pass list(...) of it, "
    "or the model itself",
    Kind.AWAITED: "Its close() has to be awaited: await it, or pass it to callback() of an "
    "`async with` scope",
    Kind.STORAGE: "Pass the tensor that it belongs to",
    Kind.ARRAY: "The last reference to an array keeps its memory: use `del`",
    Kind.TENSOR: "It is a nested tensor, which cannot be emptied in place: use `del`",
}
_qualname_of = type.__dict__["__qualname__"].__get__


def _unknown(thing: Any, name: str, kind: Kind) -> TypeError:
    """Return the error for an object of an unsupported kind."""
    is_class = kind is Kind.LEAF and is_instance(thing, type)
    advice = "It is a class: pass an instance" if is_class else _ADVICE.get(kind, "")
    return _error(thing, advice or "Pass models, tensors, or objects that hold them")


def _error(thing: Any, advice: str) -> TypeError:
    kind = f"{module_of(type(thing))}.{_qualname_of(type(thing))}"
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    return TypeError(f"release() cannot release {article} {kind}. {advice}. {_UNCHANGED}")


def _is_standard_stream(thing: Any) -> bool:
    names = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    return any(thing is getattr(sys, name, None) for name in names)
