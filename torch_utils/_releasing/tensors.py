"""Tensors: counted with their gradients, and emptied in place."""

from __future__ import annotations

from collections.abc import Sequence, Set
from gc import get_referents
from itertools import compress
from operator import and_, not_
from typing import Any

from torch_utils._releasing.claims import claim, drop_claims
from torch_utils._releasing.counting import count_contents, count_tensors
from torch_utils._releasing.in_use import swap_all
from torch_utils._releasing.reading import contents_of, slots_of
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.trees import AT_ONCE
from torch_utils._runtime import whole_torch


class TensorTarget(Target):
    """A tensor: the same object afterwards, of no elements."""

    _is_spared = False

    def spare(self, keys: Set[int]) -> None:
        self._is_spared = id(self.thing) in keys

    def count(self, inventory: Inventory) -> None:
        count_contents(inventory, self.name, self.thing)

    def give_up(self, place: str) -> None:
        if not self._is_spared:
            empty_tensor(self.thing)


class TensorsTarget(Target):
    """Tensors of torch's own classes, thousands perhaps, emptied in steps of C.

    What cannot be emptied so is left over, for a target of its own.
    """

    def __init__(self, tensors: list[Any], names: list[str]) -> None:
        super().__init__(None, f"{names[0]} and others")
        self._tensors = tensors
        self._names = names
        self._spared: tuple[list[Any], list[str]] = [], []
        self._emptied = 0
        self._left: list[int] = []

    def add(self, tensors: list[Any], names: list[str]) -> None:
        """Take more of them."""
        self._tensors += tensors
        self._names += names

    def claim(self, caller: Any) -> None:
        mine = claim(self._tensors, caller)
        if not all(mine):
            tensors, names = compress(self._tensors, mine), compress(self._names, mine)
            # In one step of C: an interrupt leaves both as they were.
            vars(self).update(_tensors=list(tensors), _names=list(names))

    def drop_claim(self, caller: Any) -> None:
        drop_claims(self._tensors, caller)

    def spare(self, keys: Set[int]) -> None:
        tensors, names = self._tensors, self._names
        are_spared = [id(tensor) in keys for tensor in tensors]
        self._spared = list(compress(tensors, are_spared)), list(compress(names, are_spared))
        self._tensors = list(compress(tensors, map(not_, are_spared)))
        self._names = list(compress(names, map(not_, are_spared)))

    def count(self, inventory: Inventory) -> None:
        count_tensors(inventory, self._tensors, self._names)
        count_tensors(inventory, *self._spared)

    def give_up(self, place: str) -> None:
        while self._emptied < len(self._tensors):  # From where an interrupt came.
            some = self._tensors[self._emptied : self._emptied + AT_ONCE]
            if not empty_tensors(some):
                self._left += range(self._emptied, self._emptied + len(some))
            self._emptied += len(some)

    def left_over(self) -> list[Target]:
        left = (*self._left, *range(self._emptied, len(self._tensors)))
        return [TensorTarget(self._tensors[n], self._names[n]) for n in left]


# That of `release`'s tuple of objects, or of a container in it, the target's, and the argument's
# or the list's that is being emptied.
_REFERENCES_OF_RELEASE = 3


def empty_tensor(tensor: Any) -> None:
    """Make a tensor object let go of its memory, its graph, its base and its attributes.

    The object gets another C++ tensor: of the same class, dtype and device, with the shape (0,).
    The old one stays whole for whoever has a share in it (views, arrays, DLPack capsules,
    autograd graphs, collectives, functions at work in other threads) and goes with the last of
    them. Swapping ``data`` or calling `Tensor.set_` would change it under their hands.

    What compiled code returns of its CUDA graphs stays as it is: it hands out the same object
    again, and torch cannot swap what it keeps so.

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
    is_kept_for_replay = getattr(torch._C, "_is_cached_tensor", None)
    if is_kept_for_replay is not None and is_kept_for_replay(tensor):
        return
    base = torch.Tensor
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if base.is_leaf.__get__(tensor):
            base.grad.__set__(tensor, None)
        swap_all(swap, [tensor], [_nothing_like(torch, tensor)], _REFERENCES_OF_RELEASE + 1)
        _clear_attributes(base, tensor)


def empty_tensors(tensors: Sequence[Any]) -> bool:
    """Empty some tensors of torch's own classes as `empty_tensor` does.

    Returns:
        False if they have to be emptied one by one, each with its own error perhaps. Some of them
        may be empty by then, which is no harm.
    """
    torch = whole_torch()
    swap = getattr(getattr(torch, "_C", None), "_swap_tensor_impl", None)
    if torch is None or swap is None:
        return torch is None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        try:
            nothings = _nothings_like(torch, tensors)
            if not nothings:
                return False
            swap_all(swap, tensors, nothings, _REFERENCES_OF_RELEASE)
        except Exception:
            # What one of them raises, whatever it is, must not keep the others: see above.
            return False
        while nothings:  # One by one, so that other threads may have their turn in between.
            nothings.pop()
        if len(get_referents(*tensors)) > len(tensors):  # Each refers to its class.
            for tensor in tensors:
                if len(get_referents(tensor)) > 1:
                    _clear_attributes(torch.Tensor, tensor)
    return True


def _clear_attributes(base: Any, tensor: Any) -> None:
    """Drop what the Python object itself holds: hooks, attributes, a wrapper's inner tensors."""
    base._backward_hooks.__set__(tensor, None)
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
    with torch._C._InferenceMode(base.is_inference(tensor)):
        if base.is_quantized.__get__(tensor):
            return torch._empty_affine_quantized(
                (0,), scale=1.0, zero_point=0, dtype=dtype, device=device
            )
        return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)


def _nothings_like(torch: Any, tensors: Sequence[Any]) -> list[Any]:
    """Make `_nothing_like` for each, and drop their gradients; empty if there is an odd one."""
    base = torch.Tensor
    dtypes = list(map(base.dtype.__get__, tensors))
    one_of_each = dict(zip(dtypes, tensors, strict=True)).values()
    if any(map(base.is_quantized.__get__, one_of_each)) or any(map(base.is_inference, tensors)):
        return []
    are_leaves = list(map(base.is_leaf.__get__, tensors))
    for tensor in compress(tensors, are_leaves):
        base.grad.__set__(tensor, None)
    need_gradients = map(and_, are_leaves, map(base.requires_grad.__get__, tensors))
    # Neither a mode of the program's nor its default device has a say in this.
    with torch._C._InferenceMode(False):
        if len(one_of_each) == 1 and all(map(base.is_cpu.__get__, tensors)):
            nothings = _usual(torch, dtypes[0], len(tensors))
        else:
            devices = map(base.device.__get__, tensors)
            nothings = [
                torch.empty(0, dtype=dtype, device=device)
                for dtype, device in zip(dtypes, devices, strict=True)
            ]
    for nothing in compress(nothings, need_gradients):
        base.requires_grad.__set__(nothing, True)
    return nothings


def _usual(torch: Any, dtype: Any, count: int) -> list[Any]:
    """Make tensors of no elements in host memory, by the constructor that is quickest."""
    made = torch.Tensor()
    if made.dtype == dtype and made.is_cpu:  # The default type may be any.
        return [torch.Tensor() for _ in range(count)]
    return [torch.empty(0, dtype=dtype, device="cpu") for _ in range(count)]
