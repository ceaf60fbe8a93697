"""Tensors: counted with their gradients, and emptied in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._runtime import loaded_torch


class TensorTarget(Target):
    """A tensor: the same object afterwards, of no elements."""

    def count(self, inventory: Inventory) -> None:
        count_tensor(inventory, self.name, self.thing)

    def give_up(self, place: str) -> None:
        empty_tensor(self.thing)


def count_tensor(inventory: Inventory, name: str, tensor: Any) -> None:
    """Note a tensor and its gradient."""
    inventory.add(name, tensor)
    if tensor.is_leaf and tensor.grad is not None:
        inventory.add(f"{name}.grad", tensor.grad)


def count_contents(inventory: Inventory, name: str, contents: Any, depth: int) -> None:
    """Note the tensors in nested dictionaries, lists and tuples."""
    torch = loaded_torch()
    if torch is None:
        return
    if isinstance(contents, torch.Tensor):
        count_tensor(inventory, name, contents)
    elif depth and isinstance(contents, Mapping):
        for key, value in contents.items():
            part = key if isinstance(key, str) else type(key).__name__
            count_contents(inventory, f"{name}.{part}", value, depth - 1)
    elif depth and isinstance(contents, Sequence) and not isinstance(contents, (str, bytes)):
        for index, value in enumerate(contents):
            count_contents(inventory, f"{name}[{index}]", value, depth - 1)


def empty_tensor(tensor: Any) -> None:
    """Make a tensor let go of its storage.

    It keeps its class, layout and dtype, and has the shape (0,). Views of it, and an autograd
    graph that saved it, keep the storage for themselves and stay right. Swapping ``data``
    works for every kind of tensor, inference tensors included; `Tensor.set_` refuses many, and
    resizing the storage to nothing makes a crash of the next use of a view.
    """
    torch = loaded_torch()
    if torch is None:
        return
    if tensor.is_leaf:
        tensor.grad = None
    with torch.no_grad():
        tensor.data = _nothing_like(torch, tensor)


def _nothing_like(torch: Any, tensor: Any) -> Any:
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            tensor.new_empty((1, 0), dtype=torch.long, layout=torch.strided),
            tensor.new_empty((0,), layout=torch.strided),
            (0,),
            check_invariants=True,
        )
    if tensor.layout == torch.strided and not tensor.is_quantized:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.layout == torch.strided:
        return tensor.detach()[:0].clone()  # quantised: keeps its scale and zero point
    if tensor.layout == torch._mkldnn:
        return torch.empty(1, dtype=tensor.dtype).to_mkldnn()  # It has no empty ones.
    blocks = (1, 1) if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    indices = torch.zeros(1, dtype=torch.long, device=tensor.device)
    values = torch.empty((0, *blocks), dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_compressed_tensor(
        indices, indices[:0], values, (0, 0), layout=tensor.layout, check_invariants=True
    )
