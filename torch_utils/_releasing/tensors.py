"""Tensors: counted with their gradients, and emptied in place."""

from __future__ import annotations

import sys
from typing import Any

from torch_utils._releasing.counting import count_contents
from torch_utils._releasing.in_use import is_own_variable, keep_while_used
from torch_utils._releasing.reading import contents_of, slots_of, undisturbed
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._runtime import whole_torch


class TensorTarget(Target):
    """A tensor: the same object afterwards, of no elements."""

    def count(self, inventory: Inventory) -> None:
        count_contents(inventory, self.name, self.thing)

    def give_up(self, place: str) -> None:
        empty_tensor(self.thing)


# That of `release`'s tuple of objects, or of a container in it, the target's, the argument's, and
# getrefcount's. A thread at work with the tensor has one more, and so has the program's variable.
_REFERENCES_OF_RELEASE = 4


def empty_tensor(tensor: Any) -> None:
    """Make a tensor object let go of its memory, its graph, its base and its attributes.

    The object gets another C++ tensor: of the same class, dtype and device, with the shape (0,).
    The old one stays whole for whoever has a share in it (views, arrays, DLPack capsules,
    autograd graphs, collectives, functions at work in other threads) and goes with the last of
    them. Swapping ``data`` or calling `Tensor.set_` would change it under their hands.

    Raises:
        RuntimeError: This torch cannot do that. The tensor was left whole.
    """
    torch = whole_torch()
    if torch is None:
        return
    swap = getattr(torch._C, "_swap_tensor_impl", None)
    if swap is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot empty a tensor that others may be using, so it "
            "was left whole; delete the variables that refer to it instead"
        )
    base = torch.Tensor
    with undisturbed(torch):
        if base.is_leaf.__get__(tensor):
            base.grad.__set__(tensor, None)
        nothing = _nothing_like(torch, tensor)
        others = sys.getrefcount(tensor) - _REFERENCES_OF_RELEASE
        if others > 1 or (others == 1 and not is_own_variable(tensor)):
            keep_while_used(nothing)  # Before the swap: it has the old C++ tensor afterwards.
        swap(tensor, nothing)
        _clear_attributes(tensor)


def _clear_attributes(tensor: Any) -> None:
    """Drop what the Python object itself holds: hooks, attributes, a wrapper's inner tensors."""
    tensor._backward_hooks = None
    contents_of(tensor).clear()
    for _, slot in slots_of(type(tensor)):
        try:
            slot.__delete__(tensor)
        except (AttributeError, TypeError):
            continue  # It has none, or a class made in C has a read-only field of its own.


def _nothing_like(torch: Any, tensor: Any) -> Any:
    base = torch.Tensor
    is_leaf, dtype = base.is_leaf.__get__(tensor), base.dtype.__get__(tensor)
    device = base.device.__get__(tensor)
    needs_gradient = is_leaf and base.requires_grad.__get__(tensor)
    # Neither a mode of the program's nor its default device has a say in this.
    with torch.inference_mode(base.is_inference(tensor)):
        if base.is_quantized.__get__(tensor):
            return torch._empty_affine_quantized(
                (0,), scale=1.0, zero_point=0, dtype=dtype, device=device
            )
        return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)
