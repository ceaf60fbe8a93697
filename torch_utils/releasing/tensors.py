"""Empty tensors in place, and let go of those that an ordinary object holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from functools import lru_cache
from typing import Any

from torch_utils._runtime import DEBUG, cuda_is_of_parent, early_bound, log, private, whole_torch
from torch_utils.releasing.modules import stand_in
from torch_utils.releasing.objects import (
    CONTAINERS,
    TARGETS,
    Kind,
    Kinds,
    attributes_of,
    contents_of,
    is_instance,
    name_of,
    parts_of,
    slots_of,
)
from torch_utils.releasing.storages import Inventory, Target, is_plain

_LEVELS = 8  # of nested containers
_REBUILT = frozenset((list, tuple, dict, OrderedDict))
_PLAIN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


class TensorTarget(Target):
    """A tensor. One that the caller passed has no elements after its release."""

    __slots__ = ()
    is_tensor = True

    def count(self, inventory: Inventory) -> None:
        inventory.add(self.name, self.thing)

    def give_up(self, place: str, trash: list[Any]) -> None:
        """Replace the object's C++ tensor by an empty one. Call this inside `without_overrides`.

        The new C++ tensor has the same class, dtype and device, and the shape (0,). The old one
        stays intact for its other users: views, arrays, DLPack capsules, autograd graphs,
        collectives, and functions in other threads, which own a reference. Changing ``data`` or
        calling `Tensor.set_` would change it for them as well. A *method* of this very tensor that
        another thread is running borrows the C++ tensor, and must have ended.

        Outputs of compiled code's CUDA graphs stay as they are: torch returns the same object
        again, and cannot swap it.

        Raises:
            RuntimeError: This torch cannot swap tensors. The tensor stays intact.
        """
        if not self.is_named:
            return  # The object that contains it lets it go.
        torch: Any = whole_torch()
        swap, is_cached = _swapping(torch)
        if swap is None:
            raise RuntimeError(
                f"torch {torch.__version__} cannot empty a tensor in place, so it was left whole; "
                "delete the variables that refer to it instead"
            )
        if is_cached is not None and is_cached(self.thing):
            return
        base = torch.Tensor
        if base.is_cuda.__get__(self.thing) and cuda_is_of_parent(torch):
            return  # A forked child can neither use nor release it.
        if base.is_leaf.__get__(self.thing):
            base.grad.__set__(self.thing, None)
        other = nothing_like(torch, self.thing)
        swap(self.thing, other)
        trash.append(other)
        base._backward_hooks.__set__(self.thing, None)
        contents = contents_of(self.thing)
        if contents:
            trash.append(dict(contents))
            contents.clear()
        for slot in () if is_plain(torch, self.thing) else slots_of(type(self.thing)):
            try:
                trash.append(slot.__get__(self.thing))
                slot.__delete__(self.thing)
            except (AttributeError, TypeError):
                continue  # The slot is empty, or a read-only field of a C class.


@lru_cache(maxsize=1)
def _swapping(torch: Any) -> tuple[Any, Any]:
    return private(torch, "_C._swap_tensor_impl"), private(torch, "_C._is_cached_tensor")


def nothing_like(torch: Any, tensor: Any) -> Any:
    """Return an empty tensor with the dtype, device and gradient setting of another."""
    base = torch.Tensor
    dtype, device = base.dtype.__get__(tensor), base.device.__get__(tensor)
    needs_gradient = base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor)
    if base.is_quantized.__get__(tensor):
        return torch._empty_affine_quantized(
            (0,), scale=1.0, zero_point=0, dtype=dtype, device=device
        )
    if base.is_inference(tensor) != torch.is_inference_mode_enabled():
        with torch.inference_mode(base.is_inference(tensor)):
            return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)
    return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)


class HolderTarget(Target):
    """An object that holds models or tensors in attributes.

    Its models are targets of their own. In an attribute, also in containers, a tensor is replaced
    by an empty one, and a model that stays for others by a tombstone. The tensor or model itself,
    and a container that others may use, are not changed.
    """

    is_silent = True

    def __init__(self, thing: Any, name: str, *, is_named: bool) -> None:
        super().__init__(thing, name, is_named=is_named)
        self._spared: Set[int] = frozenset()

    def spare(self, used: Set[int]) -> None:
        super().spare(used)
        self._spared = used

    def give_up(self, place: str, trash: list[Any]) -> None:
        thing, self._place, self._kinds = self.thing, place, Kinds(whole_torch())
        if is_instance(thing, dict):
            self._let_go(thing, dict.items(thing), dict.__setitem__, trash)
        slots = {slot.__name__: slot for slot in slots_of(type(thing))}
        attributes = attributes_of(thing)
        filled = [name for name in attributes if name in slots]
        in_slots = [(slots[name], attributes.pop(name)) for name in filled]
        if attributes:
            self._let_go(contents_of(thing), attributes.items(), dict.__setitem__, trash)
        self._let_go(thing, in_slots, _set_slot, trash)

    def _let_go(self, owner: Any, items: Any, put: Any, trash: list[Any]) -> None:
        for key, value in list(items):
            emptied = self._without_tensors(value, _LEVELS)
            if emptied is not value:
                trash.append(value)
                put(owner, key, emptied)

    def _without_tensors(self, value: Any, levels: int) -> Any:
        kind = self._kinds(value)
        if kind is Kind.TENSOR:
            return nothing_like(whole_torch(), value)
        if kind in TARGETS and id(value) in self._spared:
            return stand_in(value, f"the {name_of(type(value))} of {self.name}", self._place)
        if kind not in CONTAINERS or kind is Kind.RECORD or not levels:
            return value
        parts = {id(part): part for part, _ in parts_of(value, "", self._kinds)}
        emptied = {key: self._without_tensors(part, levels - 1) for key, part in parts.items()}
        if all(emptied[key] is part for key, part in parts.items()):
            return value
        exact = type(value)
        is_mapping = exact is dict or exact is OrderedDict
        if exact not in _REBUILT or (is_mapping and not _PLAIN_KEYS.issuperset(map(type, value))):
            return None  # A copy would run code of the program, such as the hash of a key.
        if is_mapping:
            return exact((key, emptied.get(id(part), part)) for key, part in value.items())
        return exact(emptied.get(id(part), part) for part in value)


def _set_slot(owner: Any, slot: Any, value: Any) -> None:
    slot.__set__(owner, value)


@early_bound
def safe_tensor_cleanup(tensor_attr_name: str, obj: Any) -> bool:
    """Set the attribute ``obj.<tensor_attr_name>`` to None, to drop the tensors that it holds.

    Works for plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers. The attribute may hold a tensor or a list, tuple or dictionary of
    tensors. It is meant for destructors: it never raises, imports nothing and initialises no
    device. It is as thread-safe as setting an attribute.

    Other references keep the tensor's memory alive. To free it nevertheless, use `release`.

    Args:
        tensor_attr_name: The name of the attribute.
        obj: Its owner. It may be None or half built.

    Returns:
        True if the attribute held something and was cleared. False if it was missing or None, or
        if the owner refused the change and is unchanged.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner or a validating __setattr__ may raise
            # anything. A deleter may still work.
            log(DEBUG, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this for owners that may be half built or torn down.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False
