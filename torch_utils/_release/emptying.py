"""Empty released objects: a tensor has no elements then, and another object is a tombstone.

A tombstone raises one clear error on any further use. Destructors, debuggers and pretty-printers
may still inspect it by `hasattr`, truth value or `repr`. For them, reading an attribute raises an
AttributeError as well.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

from torch_utils._release.objects import (
    class_contents,
    find_in_class,
    is_heap_type,
    is_released,
    layout_of,
)
from torch_utils._runtime import cuda_is_of_parent, early_bound, private, whole_torch
from torch_utils.errors import ReleasedAttributeError, ReleasedError

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
def _record_of(tombstone: Any) -> ReleaseRecord:
    own = class_contents(type(tombstone)).get("_record")
    record: ReleaseRecord = _read(tombstone, "__dict__")[_KEY] if own is None else own
    return record


@early_bound
def refuse(tombstone: Any, use: str, kind: type[ReleasedError] = ReleasedError) -> NoReturn:
    """Raise the error for the use of a released object. Destructors may call this."""
    record = _record_of(tombstone)
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
# In `isinstance`, pydantic before 2.12 first looks whether the object has one of these.
_CLOSING |= {"__pydantic_validator__": None, "__pydantic_decorators__": None}


@early_bound
class Tombstone:
    """The class of a released object.

    The object keeps its identity but is empty. `isinstance` still reports the former class, so
    that code that checks the type reaches the clear error. The object is true, equal only to
    itself, and has only the attributes of every object.
    """

    _is_tombstone = True

    def __getattribute__(self, name: str) -> Any:
        former = _record_of(self).kind
        if name == "__class__":
            return former
        if name == "__module__":
            return former.__module__
        if name in _READABLE:
            return _read(self, name)
        if name in _CLOSING and hasattr(former, name):
            return _CLOSING[name]
        return refuse(self, name, ReleasedAttributeError)

    # A former class, from which the tombstone derives, may define its own.
    __getattr__ = __getattribute__

    def __setattr__(self, name: str, value: object = None) -> None:
        refuse(self, name, ReleasedAttributeError)

    __delattr__ = __setattr__

    def __dir__(self) -> list[str]:
        return dir(object)

    def __bool__(self) -> bool:
        return True  # For ``if self.model`` in destructors.

    def __repr__(self) -> str:
        return f"<released {_record_of(self).name}>"

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


class _Neutral:
    """The first base of new tombstones; the `__init_subclass__` of the program does not run."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None: ...


def can_bury(kind: type) -> bool:
    """Return whether objects of a class can become tombstones: it is written in Python.

    The `mro` of a metaclass would run for a class below.
    """
    return is_heap_type(kind) and find_in_class(type(kind), "mro") is type.__dict__["mro"]


def bury(
    thing: Any, name: str, place: str, trash: list[Any], *, shares_dictionary: bool = False
) -> None:
    """Turn an object into a tombstone and empty it. Idempotent, also after an interrupt.

    In this order, a thread that is using the object sees the tombstone, never half an object. The
    dictionary and the slots are emptied. Of two threads, the first one determines the message. What
    was taken out goes to ``trash``: dropping it may run destructors of the program. An object whose
    class cannot be changed, because it is not written in Python, is only emptied: Python's own
    AttributeError then says what is missing.

    Args:
        thing: The object.
        name: Its name in messages.
        place: Where it was released, in messages.
        trash: Takes what was in it.
        shares_dictionary: Whether something else uses its ``__dict__``, such as another object. It
            stays as it is then, and this object gets another one.
    """
    own, _ = layout_of(type(thing))
    contents: dict[str, Any] = {} if own is None else own.__get__(thing)
    record = ReleaseRecord(type(thing), name, place)
    if shares_dictionary:
        own.__set__(thing, {_KEY: record})
        contents = {}
    elif own is not None:
        record = contents.setdefault(_KEY, record)
    if not is_released(thing) and not _become_tombstone(thing, record, own is not None):
        trash.append(dict(contents))
        contents.clear()
    if type(thing) is not Tombstone:  # A plain tombstone has no slots.
        _empty_slots(thing, record.kind, trash)
    if len(contents) > 1:
        # A new dictionary first, for a thread that reads the name meanwhile.
        layout_of(type(thing))[0].__set__(thing, {_KEY: record})
        for key in list(contents):  # Another thread may use the old one.
            if key is not _KEY and type(key) is str:
                trash.append(contents.pop(key, None))
        if len(contents) > 1:  # Keys of other classes may have a hash of the program.
            trash.append(contents.copy())
            contents.clear()


def drop_attributes(thing: Any, trash: list[Any], is_memory: Callable[[Any], bool]) -> None:
    """Drop the attributes of a container that lead to memory; what stands in it is emptied."""
    dictionary, slots = layout_of(type(thing))
    contents = {} if dictionary is None else dictionary.__get__(thing)
    for name in [] if contents is thing else list(contents):
        if type(name) is str and is_memory(contents.get(name)):
            trash.append(contents.pop(name, None))
    for slot in slots:
        with suppress(AttributeError, TypeError):  # It is empty, or a field of a C class.
            if is_memory(slot.__get__(thing)):
                trash.append(slot.__get__(thing))
                slot.__delete__(thing)


def _become_tombstone(thing: Any, record: ReleaseRecord, has_dictionary: bool) -> bool:
    """Change the class of an object; return whether Python allows it."""
    makers = [_tombstone_below]
    if has_dictionary:
        makers.insert(0, _tombstone_beside)
    for make in makers:
        with suppress(TypeError):  # It has another layout, or is not written in Python.
            _CLASS.__set__(thing, make(record))
            return True
    return False


def _tombstone_beside(record: ReleaseRecord) -> type:
    """Return the tombstone class that adds the dictionary to the same base as a class does.

    Such a base is `object`, or has no slots, as ABC and Generic.
    """
    base = record.kind
    while type.__dict__["__dictoffset__"].__get__(base):
        base = type.__dict__["__base__"].__get__(base)
    if base is object:
        return Tombstone
    made = _known_below(base, None)
    if made is None:
        made = _new_tombstone(base, (_Neutral,), _METHODS)
        type.__dict__["__bases__"].__set__(made, (base,))  # Tells the program nothing.
    return made


def _tombstone_below(record: ReleaseRecord) -> type:
    """Return the tombstone class that derives from a class with slots.

    Its objects may have no dictionary, so the class has their record.
    """
    made = _known_below(record.kind, record)
    if made is None:
        contents = {**_METHODS, "__slots__": (), "_record": record}
        made = _new_tombstone(record.kind, (_Neutral, record.kind), contents)
    return made


def _known_below(base: type, record: ReleaseRecord | None) -> type | None:
    """Return the tombstone class below a class, which refers to it weakly."""
    known: type
    for known in type.__subclasses__(base):
        contents = class_contents(known)
        if "_is_tombstone" in contents and contents.get("_record") == record:
            return known
    return None


def _new_tombstone(base: type, bases: tuple[type, ...], contents: dict[str, Any]) -> type:
    if not can_bury(base):
        raise TypeError("a metaclass would run code of the program")
    maker = ABCMeta if issubclass(type(base), ABCMeta) else type
    made: type = maker.__new__(type(base), "Tombstone", bases, {**contents})
    return made


def _empty_slots(thing: Any, kind: type, trash: list[Any]) -> None:
    for slot in layout_of(kind)[1]:
        try:
            trash.append(slot.__get__(thing))
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # The slot is empty, or a read-only field of a C class.
