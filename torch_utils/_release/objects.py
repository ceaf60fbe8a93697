"""Read foreign objects without running any of their code, and empty them.

`isinstance`, `hasattr`, iteration, equality and attributes may call code of the program, which may
be slow or have side effects. So classes are compared by identity, containers are read by the
methods of the built-in classes, and attributes come from the instance's dictionary and slots.

A released object is a tombstone, which raises one clear error on any further use. Destructors,
debuggers and pretty-printers may still inspect it by `hasattr`, truth value or `repr`. For them,
reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

import sys
import types
from abc import ABCMeta
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from gc import get_referents, is_tracked
from typing import Any, NamedTuple, NoReturn

from torch_utils._runtime import cuda_is_of_parent, early_bound, private, whole_torch
from torch_utils.errors import ReleasedAttributeError, ReleasedError

bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""Return a class and its bases."""
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__
class_contents = type.__dict__["__dict__"].__get__
"""Return the attributes that a class itself defines, as a mapping proxy."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial),
    *(staticmethod, classmethod, property),
)
_SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# They lead to the whole program, or to variables of functions.
_NOT_ENTERED = (type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType)
_NOT_ENTERED_PACKAGES = frozenset(("logging", "threading", "_thread", "weakref", "_weakref"))
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
LONGEST_NAME = 200  # The names of deeply nested parts would fill the memory.
# By the ids of classes, because a metaclass may define their hash and equality.
_SHOWN_KEYS = frozenset(map(id, (str, int, float, bool, bytes, type(None))))
_CONTAINERS = frozenset(map(id, (dict, OrderedDict, *_SEQUENCES)))
# The names of classes with memory whose objects the garbage collector does not track.
_UNTRACKED = frozenset(("ndarray", "ScriptObject"))


def name_of(kind: type) -> str:
    """Return a class's name, as a plain string."""
    return str.__str__(_name_of(kind))


def module_of(kind: type) -> str:
    """Return the name of a class's module, or an empty string."""
    name = _module_of(kind)
    return name if type(name) is str else ""


def is_instance(thing: Any, kind: type) -> bool:
    """Return what `isinstance` would, without reading the object's ``__class__``."""
    return type(thing) is kind or id(kind) in map(id, bases_of(type(thing)))


def find_in_class(kind: type, name: str) -> Any:
    """Return a class's attribute, unbound, or None."""
    for base in bases_of(kind):
        contents = class_contents(base)
        if name in contents:
            return contents[name]
    return None


def is_released(thing: object) -> bool:
    """Return whether an object was released, without using it."""
    return "_is_tombstone" in class_contents(type(thing))


# Attributes


def layout_of(kind: type) -> tuple[Any, list[types.MemberDescriptorType]]:
    """Return the descriptor of a class's ``__dict__``, or None, and those of its slots.

    Properties of the program cannot replace them.
    """
    dictionary, slots = None, []
    for contents in map(class_contents, bases_of(kind)):
        own = contents.get("__dict__")
        # Some C classes have a slot.
        if type(own) is types.GetSetDescriptorType or type(own) is types.MemberDescriptorType:
            dictionary = dictionary or own
        for value in contents.values() if "__slots__" in contents else ():
            if type(value) is types.MemberDescriptorType:
                slots.append(value)
    return dictionary, slots


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes in an instance's dictionary and slots."""
    dictionary, slots = layout_of(type(thing))
    found: dict[str, Any] = {} if dictionary is None else dict(dictionary.__get__(thing))
    for slot in slots:
        with suppress(AttributeError):  # The slot is empty.
            found[slot.__name__] = slot.__get__(thing)
    return found


# Parts


def items_of(thing: Any) -> Iterator[tuple[Any, str]]:
    """Yield what stands in a list, tuple, set, deque or dictionary, with labels such as "[0]".

    Of a dictionary these are the values, and the keys that are objects. What cannot lead to memory
    is left out; see `_leads_on`.
    """
    # Copies, because others may change it. A list of pairs would set off garbage collections.
    bases = set(map(id, bases_of(type(thing))))
    for kind in _SEQUENCES:
        if id(kind) in bases:
            iterate: Callable[[Any], Iterator[Any]] = kind.__iter__
            for number, item in enumerate(list(iterate(thing))):
                if _leads_on(item):
                    yield item, f"[{number}]"
    # The globals of a module lead to everything.
    if id(dict) in bases and not dict.__contains__(thing, "__builtins__"):
        keys = list(dict.keys(thing))
        for key, value in zip(keys, list(dict.values(thing)), strict=False):
            if _leads_on(value):
                is_shown = id(type(key)) in _SHOWN_KEYS
                yield value, f"[{key!r}]" if is_shown else f"[<{name_of(type(key))}>]"
        for key in keys:
            if is_tracked(key):
                yield key, ".keys()"


def parts_of(thing: Any) -> Iterator[tuple[Any, str]]:
    """Yield what an object refers to and may lead to memory, with a label such as ".weight".

    A part is yielded once for each reference.
    """
    kind = type(thing)
    attributes = {} if id(kind) in _CONTAINERS else attributes_of(thing)
    inner: Iterable[Any] = ()
    if not _CONTAINERS.isdisjoint(map(id, bases_of(kind))):
        yield from items_of(thing)
    elif kind is types.FunctionType:  # Not its globals, which lead to everything.
        inner = (*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__)
    elif not attributes:
        inner = get_referents(thing)
    for part in inner:
        if _leads_on(part):
            yield part, ""
    for name, part in attributes.items():
        if type(name) is not str or not _leads_on(part):
            continue
        if name in _REGISTRIES and (type(part) is dict or type(part) is OrderedDict):
            for key, child in zip(list(dict.keys(part)), list(dict.values(part)), strict=False):
                yield child, f".{key}" if type(key) is str else ""
        else:
            yield part, f".{name}"


def _leads_on(part: Any) -> bool:
    """Return whether an object may lead to memory.

    What the garbage collector does not track, such as a string, holds no tensor; to ask it is much
    faster than to look.
    """
    kind = type(part)
    if id(kind) not in _CONTAINERS:
        return is_tracked(part) or _name_of(kind) in _UNTRACKED
    inner = get_referents(part)  # One step in C, however many strings and numbers there are.
    return any(map(is_tracked, inner)) or not _UNTRACKED.isdisjoint(map(_name_of, map(type, inner)))


# What counts

SKIPPED, TENSOR, ARRAY, PACKED, MODULE, TRAINING, OTHER = range(7)
MEMORY = (TENSOR, PACKED, MODULE, TRAINING)  # What makes its owner one that is emptied.
# Classes whose objects refer to memory of other owners.
_TRAINING = frozenset(
    ("Optimizer", "LRScheduler", "GradScaler", "DataLoader", "AcceleratedScheduler")
)


def kind_of(kind: type, follows_functions: bool = True) -> int:
    """Return how objects of a class are counted."""
    torch, bases = whole_torch(), set(map(id, bases_of(kind)))
    if name_of(kind) in ("ScriptObject", "RecursiveScriptModule"):  # Weights in C++.
        return PACKED
    if torch is not None and id(torch.Tensor) in bases:
        return TENSOR
    if torch is not None and id(torch.nn.Module) in bases:
        return MODULE
    is_entered = "_is_tombstone" not in class_contents(kind)
    for base in bases_of(kind):
        package, name = module_of(base).partition(".")[0], name_of(base)
        if package == "numpy" and name == "ndarray":
            return ARRAY
        if package in ("torch", "accelerate") and name in _TRAINING:
            return TRAINING
        is_entered = is_entered and package not in _NOT_ENTERED_PACKAGES
    not_entered = _NOT_ENTERED if follows_functions else (*_NOT_ENTERED, *_FUNCTIONS)
    return OTHER if is_entered and bases.isdisjoint(map(id, not_entered)) else SKIPPED


# What a release empties


@dataclass(slots=True)
class Root:
    """An object that was passed, by itself or in a container.

    Attributes:
        is_passed: Whether by itself.
        has_close: Whether it has a method ``close``, or a function in an attribute of this name.
        is_found: Whether it holds memory: a tensor, a module, an array, packed weights.
    """

    thing: Any
    name: str
    is_passed: bool = True
    has_close: bool = False
    is_found: bool = False

    def close(self) -> Any:
        """Call the object's ``close()``."""
        return self.thing.close()


OTHERS = "Pass its models or tensors, or give it a close() method"
_ONCE = "It can be read only once: pass list(...) of it, or the model itself"
_ADVICE: list[tuple[tuple[type, ...], str]] = [
    ((type,), "It is a class: pass an instance"),
    ((types.ModuleType,), "It is a module of Python, such as numpy: pass the models in it"),
    (_FUNCTIONS, "It is a function: pass what it returns, such as load() instead of load"),
    (_SUSPENDABLE, _ONCE),
]
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


def roots_of(
    objects: Sequence[Any], kind_of: Callable[[type], int], caller: str = "release()"
) -> list[Root]:
    """Return the objects to empty, each once; a container stands for what is in it.

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
        seen.add(id(thing))
        name, is_passed = f"{prefix}{label}"[:LONGEST_NAME], len(levels) == 1
        kind = kind_of(type(thing))
        has_close = False
        if kind != TENSOR:
            attributes, method = attributes_of(thing), find_in_class(type(thing), "close")
            has_close = callable(attributes.get("close")) or callable(method)
            if not _CONTAINERS.isdisjoint(map(id, bases_of(type(thing)))):
                levels.append((name, items_of(thing)))
                if not has_close and not attributes:
                    continue
                is_passed = False
        advice = "" if kind in (MODULE, TRAINING, PACKED) else _refusal(thing, kind, has_close)
        if not advice:
            name = name if kind == TENSOR else name_of(type(thing))
            roots[id(thing)] = Root(thing, name, is_passed, has_close)
        elif is_passed:
            raise unsupported(thing, advice, caller)
    return list(roots.values())


def _refusal(thing: Any, kind: int, has_close: bool) -> str:
    """Return why an object can never be released, and what to pass instead; "" if it may be.

    An object with attributes may be: it may load its model later.
    """
    if kind == TENSOR:
        is_nested = whole_torch().Tensor.is_nested.__get__(thing)  # type: ignore[union-attr]
        return "It is a nested tensor, which cannot be emptied: use `del`" if is_nested else ""
    if kind == ARRAY:
        return "The last reference to an array keeps its memory: use `del`"
    bases = bases_of(type(thing))
    for classes, advice in _ADVICE:
        if not set(map(id, bases)).isdisjoint(map(id, classes)):
            return advice
    if any(module_of(base).partition(".")[0] == "faiss" for base in bases):
        return "Call the reset() of the faiss index, and delete the variables that refer to it"
    if any(thing is getattr(sys, name, None) for name in _STREAMS):
        return "The program uses this stream"
    if not has_close and find_in_class(type(thing), "__next__") is not None:
        return _ONCE
    is_able = has_close or layout_of(type(thing)) != (None, [])
    return "" if is_able and kind != SKIPPED else OTHERS


def unsupported(thing: Any, advice: str, caller: str = "release()") -> TypeError:
    """Return the error for an object that cannot be released."""
    kind = f"{module_of(type(thing))}.{name_of(type(thing))}"
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    verb = "move" if caller == "offload()" else "release"
    rest = "Nothing was changed"
    if caller not in ("release()", "offload()"):
        rest = "Or pass it to manage() with a function as close="
    return TypeError(f"{caller} cannot {verb} {article} {kind}. {advice}. {rest}.")


# Tensors


def empty_tensor(tensor: Any, name: str, trash: list[Any]) -> None:
    """Replace the C++ tensor of an object by an empty one. Call this inside `without_overrides`.

    The new C++ tensor has the same class, dtype and device, and the shape (0,). The old one stays
    intact for its other users: views, arrays, DLPack capsules, autograd graphs, collectives, and
    functions in other threads, which own a reference. Changing ``data`` or calling `Tensor.set_`
    would change it for them as well. A *method* of this very tensor that another thread is running
    borrows the C++ tensor, and must have ended.

    Outputs of compiled code's CUDA graphs stay as they are: torch returns the same object again,
    and cannot swap it.

    Raises:
        RuntimeError: This torch cannot swap tensors, or not this one. It stays intact.
    """
    torch: Any = whole_torch()
    swap = private(torch, "_C._swap_tensor_impl")
    is_cached = private(torch, "_C._is_cached_tensor")
    if swap is not None and is_cached is not None and is_cached(tensor):
        return
    base = torch.Tensor
    if base.is_cuda.__get__(tensor) and cuda_is_of_parent(torch):
        return  # A forked child can neither use nor release it.
    retains_grad = base.retains_grad.__get__(tensor)
    if retains_grad or base.is_leaf.__get__(tensor):
        base.grad.__set__(tensor, None)
    other = _nothing_like(torch, tensor)
    reason = "retain_grad() was called on it" if retains_grad else ""
    try:
        if swap is None:
            raise RuntimeError(f"torch {torch.__version__} cannot do that")
        swap(tensor, other)
    except RuntimeError as error:
        reason = reason or str(error)
        raise RuntimeError(f"this {name} was left whole, because {reason}; use `del`") from None
    trash.append(other)
    base._backward_hooks.__set__(tensor, None)
    if contents := layout_of(type(tensor))[0].__get__(tensor):
        trash.append(dict(contents))
        contents.clear()
    _empty_slots(tensor, type(tensor), trash)


def _nothing_like(torch: Any, tensor: Any) -> Any:
    """Return an empty tensor with the dtype, device and gradient setting of another."""
    base = torch.Tensor
    needs_gradient = base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor)
    is_inference = base.is_inference(tensor)
    mode: Any = nullcontext()
    if is_inference != torch.is_inference_mode_enabled():  # It takes microseconds.
        mode = torch.inference_mode(is_inference)
    with mode:
        return base.new_empty(tensor, (0,), layout=torch.strided, requires_grad=needs_gradient)


# Tombstones

_KEY = "torch_utils: released"  # The key of a ReleaseRecord; no attribute has this name.
_CLASS: Any = object.__dict__["__class__"]
_read: Callable[[Any, str], Any] = object.__getattribute__


class ReleaseRecord(NamedTuple):
    """The class of a released object, its name in messages, and where it was released."""

    kind: type
    name: str
    place: str


@early_bound
def refuse(tombstone: Any, use: str, kind: type[ReleasedError] = ReleasedError) -> NoReturn:
    """Raise the error for the use of a released object. Destructors may call this."""
    record = _read(tombstone, "__dict__")[_KEY]
    error = kind(
        f"{record.name} was released {record.place}, so {use!r} cannot be used; load it again, "
        "or release it after its last use"
    )
    if isinstance(error, AttributeError):
        error.obj = None  # Otherwise Python suggests other attribute names.
    # Without a context: the program's own traceback is enough.
    raise error from None


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing. A released object may be closed, and its block may end."""


async def _nothing_to_await(*args: object, **kwargs: object) -> None:
    """Do nothing; for `aclose` and ``async with``."""


_READABLE = frozenset((*dir(object), "__dict__", "__call__"))
# Destructors and the ends of blocks may still use these, if the object had them.
_CLOSING = {"close": _nothing, "aclose": _nothing_to_await, "closed": True}


@early_bound
class Tombstone:
    """The class of a released object.

    The object keeps its identity but is empty. `isinstance` still reports the former class, so
    that code that checks the type reaches the clear error. The object is true, equal only to
    itself, and has only the attributes of every object.
    """

    _is_tombstone = True

    def __getattribute__(self, name: str) -> Any:
        former = _read(self, "__dict__")[_KEY].kind
        if name == "__class__":
            return former
        if name == "__module__":
            return former.__module__
        if name in _READABLE:
            return _read(self, name)
        if name in _CLOSING and hasattr(former, name):
            return _CLOSING[name]
        return refuse(self, name, ReleasedAttributeError)

    # A former class with slots, from which the tombstone derives, may define its own.
    __getattr__ = __getattribute__

    def __setattr__(self, name: str, value: object = None) -> None:
        refuse(self, name, ReleasedAttributeError)

    __delattr__ = __setattr__

    def __dir__(self) -> list[str]:
        return dir(object)

    def __bool__(self) -> bool:
        return True  # For ``if self.model`` in destructors.

    def __repr__(self) -> str:
        return f"<released {_read(self, '__dict__')[_KEY].name}>"

    # Types as comments: annotations would become attributes of every tombstone.
    __str__ = __repr__
    __format__ = object.__format__  # type: Any
    __hash__ = object.__hash__  # type: Any
    __eq__ = object.__eq__  # type: Any
    __ne__ = object.__ne__  # type: Any
    __exit__ = _nothing
    __aexit__ = _nothing_to_await

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "pickle")

    # A C function that does nothing. The former class's destructor must not run on the empty
    # object, and an interrupt in a Python function here would be printed and lost.
    __del__ = object.__hash__  # type: Any


def _refusing(name: str) -> Any:
    @early_bound
    def method(self: Any, *args: object, **kwargs: object) -> NoReturn:
        refuse(self, name)

    method.__name__ = name
    return method


_REFUSED = (
    "call len iter next reversed contains enter aenter getitem setitem delitem copy deepcopy "
    "lt le gt ge neg int float add iadd radd sub isub rsub mul imul rmul truediv rtruediv matmul "
    "rmatmul"
)
for _name in _REFUSED.split():
    setattr(Tombstone, f"__{_name}__", _refusing(f"__{_name}__"))

_METHODS = {k: v for k, v in vars(Tombstone).items() if k not in ("__dict__", "__weakref__")}


def bury(thing: Any, name: str, place: str, trash: list[Any]) -> None:
    """Turn an object into a tombstone and empty it. Idempotent, also after an interrupt.

    In this order, a thread that is using the object sees the tombstone, never half an object. The
    dictionary and the slots are emptied, which also breaks cycles. Of two threads, the first one
    determines the message. What was taken out goes to ``trash``: dropping it may run destructors
    of the program. An object without a dictionary, or whose class cannot be changed, is only
    emptied: Python's own AttributeError then says what is missing.
    """
    own, _ = layout_of(type(thing))
    if own is None:
        _empty_slots(thing, type(thing), trash)
        return
    contents = own.__get__(thing)
    record = contents.setdefault(_KEY, ReleaseRecord(type(thing), name, place))
    if not is_released(thing) and not _become_tombstone(thing, record.kind):
        trash.append(dict(contents))
        contents.clear()
    if type(thing) is not Tombstone:  # A plain tombstone has no slots.
        _empty_slots(thing, record.kind, trash)
    if len(contents) > 1:
        # A new dictionary first, for a thread that reads the name meanwhile.
        layout_of(type(thing))[0].__set__(thing, {_KEY: record})
        for key in list(contents):  # Another thread may use the old one.
            if key is not _KEY:
                trash.append(contents.pop(key, None))


def _become_tombstone(thing: Any, kind: type) -> bool:
    # Python exchanges classes that add the dictionary to the same base, such as object or ABC.
    while type.__dict__["__dictoffset__"].__get__(kind):
        kind = type.__dict__["__base__"].__get__(kind)
    with suppress(TypeError):  # The class is not written in Python, or has __slots__.
        _CLASS.__set__(thing, Tombstone if kind is object else _tombstone_of(kind))
        return True
    return False


def _tombstone_of(base: type) -> type:
    """Return the tombstone class that derives from a base, which refers to it weakly."""
    known: type
    for known in type.__subclasses__(base):
        if "_is_tombstone" in class_contents(known):
            return known
    maker = ABCMeta if issubclass(type(base), ABCMeta) else type
    contents = {**_METHODS, "__orig_bases__": ()}  # typing.Generic demands it.
    made: type = maker.__new__(type(base), "Tombstone", (base,), contents)
    return made


def _empty_slots(thing: Any, kind: type, trash: list[Any]) -> None:
    for slot in layout_of(kind)[1]:
        try:
            trash.append(slot.__get__(thing))
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # The slot is empty, or a read-only field of a C class.
