"""What may be passed to a release, and what is refused with advice."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_utils._release.objects import (
    ARRAY,
    FUNCTIONS,
    LONGEST_NAME,
    MEMORY,
    MODULE,
    PACKED,
    SKIPPED,
    TENSOR,
    TRAINING,
    Kinds,
    attributes_of,
    bases_of,
    find_in_class,
    is_container,
    is_namespace,
    is_released,
    items_of,
    layout_of,
    module_of,
    name_of,
)
from torch_utils._runtime import reference_counts, whole_torch

MOST_OBJECTS = 50_000
"""How many objects are looked at; beyond that, a garbage collection is as fast."""
BULK = 1000
"""References of one object; what they lead to is looked at last."""


@dataclass(slots=True)
class Root:
    """An object that was passed, by itself or in a container.

    Attributes:
        thing: The object.
        kind: How it is counted.
        is_passed: Whether it was passed by itself.
        is_container: Whether it stays a container, and loses only attributes that hold memory.
        has_close: Whether it has a method ``close``, or a function in an attribute of this name.
    """

    thing: Any
    name: str
    kind: int
    is_passed: bool = True
    is_container: bool = False
    has_close: bool = False

    def close(self) -> Any:
        """Call the object's ``close()``."""
        return self.thing.close()

    @property
    def destructor(self) -> Any:
        """The ``__del__`` of its class, or None."""
        return find_in_class(type(self.thing), "__del__")


OTHERS = "Pass its models or tensors, or give it a close() method"
_ONCE = "It can be read only once: pass list(...) of it, or the model itself"
_SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_ADVICE: list[tuple[tuple[type, ...], str]] = [
    ((type,), "It is a class: pass an instance"),
    ((types.ModuleType,), "It is a module of Python, such as numpy: pass the models in it"),
    (FUNCTIONS, "It is a function: pass what it returns, such as load() instead of load"),
    (_SUSPENDABLE, _ONCE),
]
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


def roots_of(
    objects: Sequence[Any],
    kinds: Kinds,
    caller: str = "release()",
    claim: Callable[[Any], bool] = lambda thing: True,
) -> list[Root]:
    """Return the objects to empty, each once; a container stands for what is in it.

    Args:
        objects: The objects.
        kinds: How objects are counted.
        caller: Who asks, for messages.
        claim: Returns whether an object is left to the caller. It is asked before the object is
            read.

    Raises:
        TypeError: An object that was passed by itself can never be released.
    """
    roots: dict[int, Root] = {}
    seen: set[int] = set()
    passed: Iterator[tuple[Any, str]] = zip(objects, map(name_of, map(type, objects)), strict=True)
    levels = [("", passed)]
    while levels:
        prefix, items = levels[-1]
        thing, label = next(items, (None, None))
        if label is None:
            levels.pop()
        if thing is None or id(thing) in seen or is_released(thing):
            continue
        if len(levels) > 1 and not kinds.may_lead_on(thing):
            continue
        seen.add(id(thing))
        name, is_passed = f"{prefix}{label}"[:LONGEST_NAME], len(levels) == 1
        if not is_container(type(thing)) and not claim(thing):
            continue
        kind = kinds.of(type(thing))
        root = Root(thing, name if kind == TENSOR else name_of(type(thing)), kind, is_passed)
        if kind != TENSOR:
            attributes = attributes_of(thing)
            root.has_close = kinds.has_close(type(thing)) or callable(attributes.get("close"))
            root.is_container = is_container(type(thing))
            if root.is_container:
                levels.append((name, items_of(thing)))
                if not root.has_close and not attributes and not _is_refused_namespace(root):
                    continue
        advice = "" if kind in (MODULE, TRAINING, PACKED) else _refusal(root)
        if not advice:
            roots[id(thing)] = root
        elif is_passed:
            raise unsupported(thing, advice, caller)
    return list(roots.values())


def _is_refused_namespace(root: Root) -> bool:
    return root.is_passed and type(root.thing) is dict and is_namespace(root.thing)


def _refusal(root: Root) -> str:
    """Return why an object can never be released, and what to pass instead; "" if it may be.

    An object with attributes may be: it may load its model later.
    """
    thing = root.thing
    if root.kind == TENSOR:
        is_nested = whole_torch().Tensor.is_nested.__get__(thing)  # type: ignore[union-attr]
        return "It is a nested tensor, which cannot be emptied: use `del`" if is_nested else ""
    if root.kind == ARRAY:
        return "The last reference to an array keeps its memory: use `del`"
    if _is_refused_namespace(root):
        return "It has all variables of a module: pass the models in it"
    if root.is_container:
        return ""
    bases = bases_of(type(thing))
    for classes, advice in _ADVICE:
        if not set(map(id, bases)).isdisjoint(map(id, classes)):
            return advice
    if any(module_of(base).partition(".")[0] == "faiss" for base in bases):
        return "Call the reset() of the faiss index, and delete the variables that refer to it"
    if any(thing is getattr(sys, name, None) for name in _STREAMS):
        return "The program uses this stream"
    if not root.has_close and find_in_class(type(thing), "__next__") is not None:
        return _ONCE
    is_able = root.has_close or layout_of(type(thing)) != (None, [])
    return "" if is_able and root.kind != SKIPPED else OTHERS


def unsupported(thing: Any, advice: str, caller: str = "release()") -> TypeError:
    """Return the error for an object that cannot be released."""
    kind = f"{module_of(type(thing))}.{name_of(type(thing))}"
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    verb = "move" if caller == "offload()" else "release"
    rest = "Nothing was changed"
    if caller not in ("release()", "offload()"):
        rest = "Or pass it to manage() with a function as close="
    return TypeError(f"{caller} cannot {verb} {article} {kind}. {advice}. {rest}.")


def holds_memory(root: Root, kinds: Kinds) -> bool:
    """Return whether an object leads to tensors or modules; to arrays, if it was passed by itself.

    What lies behind something shared does not belong to an object that only stands in a container,
    such as the settings of a model.
    """
    if root.kind in MEMORY:
        return True
    counted = (*MEMORY, ARRAY) if root.is_passed else MEMORY
    pending, bulky, seen = deque([root.thing]), list[Any](), {id(root.thing)}
    while (pending or bulky) and len(seen) < MOST_OBJECTS:
        one = pending.popleft() if pending else bulky.pop()
        parts = kinds.referents(one)
        if len(parts) > BULK and pending:
            bulky.append(one)
            continue
        for part, count in zip(parts, reference_counts(parts), strict=True):
            kind = kinds.of(type(part))
            if kind in counted:
                return True
            is_own = kind != SKIPPED and (root.is_passed or count == 1)
            if not is_own or id(part) in seen or id(part) in kinds.barren:
                continue
            if not (type(part) is dict and is_namespace(part)):
                seen.add(id(part))
                pending.append(part)
    if root.is_passed and not (pending or bulky):
        kinds.barren |= seen
    return False
