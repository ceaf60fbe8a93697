"""Find what a release empties: the objects that were passed, by themselves or in containers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch_utils._release.counting import ARRAY, MODULE, SKIPPED, TENSOR, Inventory, Root
from torch_utils._release.objects import (
    FUNCTIONS,
    SUSPENDABLE,
    attributes_of,
    bases_of,
    dictionary_slot,
    find_in_class,
    is_among,
    is_released,
    items_of,
    module_of,
    name_of,
    slots_of,
)
from torch_utils._runtime import whole_torch

_ADVICE: list[tuple[tuple[type, ...], str]] = [
    ((type,), "It is a class: pass an instance"),
    ((types.ModuleType,), "It is a module of Python, such as numpy: pass the models in it"),
    (FUNCTIONS, "It is a function: pass what it returns, such as load() instead of load"),
    (SUSPENDABLE, "Reading it runs its code: pass list(...) of it, or the model itself"),
]
_OTHERS = "Pass its models or tensors, or give it a close() method"
_NESTED = "It is a nested tensor, which cannot be emptied in place: use `del`"
_AWAITABLE = 0x80 | 0x200  # inspect's CO_COROUTINE and CO_ASYNC_GENERATOR


def roots_of(objects: Sequence[Any], inventory: Inventory) -> list[Root]:
    """Return the objects to empty, each once; a container stands for what is in it.

    Raises:
        TypeError: An object that was passed by itself can never be released.
    """
    roots: dict[int, Root] = {}
    seen: set[int] = set()
    pending = [(thing, name_of(type(thing)), True) for thing in reversed(objects)]
    while pending:
        thing, name, is_passed = pending.pop()
        if thing is None or id(thing) in seen or is_released(thing):
            continue
        seen.add(id(thing))
        if inventory.kind(thing) == TENSOR:
            if whole_torch().Tensor.is_nested.__get__(thing):  # type: ignore[union-attr]
                if is_passed:
                    raise unsupported(thing, _NESTED)
            else:
                roots[id(thing)] = Root(thing, name, is_passed)
            continue
        items = items_of(thing)
        if items is not None:
            pending += [(item, name + label, False) for item, label in items][::-1]
        if items is not None and closer_of(thing) is None and not attributes_of(thing):
            continue
        advice = refusal(thing, inventory)
        if not advice:
            roots[id(thing)] = Root(thing, name_of(type(thing)), is_passed and items is None)
        elif is_passed:
            raise unsupported(thing, advice)
    return list(roots.values())


def check_kinds(objects: Sequence[Any], caller: str) -> None:
    """Check that objects may be released later.

    Raises:
        TypeError: One of them can never be.
    """
    try:
        roots_of(objects, Inventory())
    except TypeError as error:
        text = str(error).removeprefix("release()").replace(_UNCHANGED, _OR_CLOSE)
        raise TypeError(f"{caller}{text}") from None


def closer_of(thing: Any) -> Callable[[], Any] | None:
    """Return what closes an object: its method, or a function in its attribute ``close``."""
    close = attributes_of(thing).get("close")
    if callable(close):
        return close  # type: ignore[no-any-return]
    method = find_in_class(type(thing), "close")
    is_method = type(method) in (staticmethod, classmethod) or callable(method)
    return (lambda: thing.close()) if is_method else None


def refusal(thing: Any, inventory: Inventory) -> str:
    """Return why an object can never be released, and what to pass instead; "" if it may be.

    An object with attributes may be: it may load its model later.
    """
    kind, sort = type(thing), inventory.kind(thing)
    bases = bases_of(kind)
    for classes, advice in _ADVICE:
        if any(is_among(base, bases) for base in classes):
            return advice
    if sort == ARRAY:
        return "The last reference to an array keeps its memory: use `del`"
    if name_of(kind) in ("UntypedStorage", "TypedStorage"):
        return "Pass the tensor that it belongs to"
    if any(module_of(base).partition(".")[0] == "faiss" for base in bases):
        return "Call the reset() of the faiss index, and delete the variables that refer to it"
    if any(thing is getattr(sys, name, None) for name in _STREAMS):
        return "The program uses this stream"
    closer = closer_of(thing)
    if closer is None and find_in_class(kind, "__next__") is not None:
        return "It can be read only once: pass list(...) of it, or the model itself"
    code = getattr(find_in_class(kind, "close"), "__code__", None)
    if sort != MODULE and type(code) is types.CodeType and code.co_flags & _AWAITABLE:
        return (
            "Its close() has to be awaited: await it, or pass it to callback() of an `async with` "
            "scope"
        )
    if sort == SKIPPED or (
        sort != MODULE and closer is None and not (slots_of(kind) or dictionary_slot(kind))
    ):
        return _OTHERS
    return ""


_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


_UNCHANGED = "Nothing was changed."
_OR_CLOSE = "Or pass it to manage() with a function as close=."
_USUAL_NAMES = ("model", "module", "encoder", "transformer", "pipeline", "network", "net")
_qualname_of = type.__dict__["__qualname__"].__get__


def unsupported(thing: Any, advice: str) -> TypeError:
    """Return the error for an object that cannot be released."""
    kind = f"{module_of(type(thing))}.{_qualname_of(type(thing))}"
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    return TypeError(f"release() cannot release {article} {kind}. {advice}. {_UNCHANGED}")


def without_memory(thing: Any) -> TypeError | None:
    """Return the error for an object with attributes that holds nothing to release.

    None if an attribute such as ``model`` is None: it is not loaded yet, or no longer.
    """
    for key, value in attributes_of(thing).items():
        if value is None and type(key) is str and key.strip("_") in _USUAL_NAMES:
            return None
    name = name_of(type(thing))
    computed = [n for n in _USUAL_NAMES if find_in_class(type(thing), n) is not None]
    if computed:
        return unsupported(thing, f"Pass {name}.{computed[0]}")
    if find_in_class(type(thing), "__getattr__") is not None:
        return unsupported(
            thing, "It may be a proxy: pass the object behind it, or pass close= to manage()"
        )
    return unsupported(thing, _OTHERS)
