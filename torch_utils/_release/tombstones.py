"""Empty objects in place: the tombstone that an object becomes, and the empty tensor.

A released object is a tombstone, which raises one clear error on any further use. Destructors,
debuggers and pretty-printers may still inspect it by `hasattr`, truth value or `repr`. For them,
reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

from torch_utils._release.counting import is_plain
from torch_utils._release.objects import (
    class_contents,
    dictionary_slot,
    is_released,
    slots_of,
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
    if swap is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot empty a tensor in place, so it was left whole; "
            "delete the variables that refer to it instead"
        )
    if is_cached is not None and is_cached(tensor):
        return
    base = torch.Tensor
    if base.is_cuda.__get__(tensor) and cuda_is_of_parent(torch):
        return  # A forked child can neither use nor release it.
    retains_grad = base.retains_grad.__get__(tensor)
    if retains_grad or base.is_leaf.__get__(tensor):
        base.grad.__set__(tensor, None)
    other = _nothing_like(torch, tensor)
    try:
        swap(tensor, other)
    except RuntimeError as error:
        reason = "retain_grad() was called on it" if retains_grad else str(error)
        raise RuntimeError(
            f"this {name} cannot be emptied in place, because {reason}; use `del`"
        ) from None
    trash.append(other)
    base._backward_hooks.__set__(tensor, None)
    if contents := dictionary_slot(type(tensor)).__get__(tensor):
        trash.append(dict(contents))
        contents.clear()
    if not is_plain(torch, tensor):
        _empty_slots(tensor, type(tensor), trash)


def _nothing_like(torch: Any, tensor: Any) -> Any:
    """Return an empty tensor with the dtype, device and gradient setting of another."""
    base = torch.Tensor
    kind = {"dtype": base.dtype.__get__(tensor), "device": base.device.__get__(tensor)}
    if base.is_quantized.__get__(tensor):
        return torch._empty_affine_quantized((0,), scale=1.0, zero_point=0, **kind)
    needs_gradient = base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor)
    is_inference = base.is_inference(tensor)
    mode: Any = nullcontext()
    if is_inference != torch.is_inference_mode_enabled():  # It takes microseconds.
        mode = torch.inference_mode(is_inference)
    with mode:
        return torch.empty((0,), requires_grad=needs_gradient, **kind)


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
    "add iadd radd mul imul rmul matmul"
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
    own = dictionary_slot(type(thing))
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
        dictionary_slot(type(thing)).__set__(thing, {_KEY: record})
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
    for slot in slots_of(kind):
        try:
            trash.append(slot.__get__(thing))
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # The slot is empty, or a read-only field of a C class.
