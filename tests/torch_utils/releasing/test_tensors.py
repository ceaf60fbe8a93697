"""Tests of the release of tensors."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, index"

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.releasing import gone, weak
from torch_utils import release

pytestmark = pytest.mark.usefixtures("frozen_heap")

BYTES = 4_000_000
MAKE_WRAPPER = torch.Tensor._make_wrapper_subclass  # torch's


def big() -> torch.Tensor:
    return torch.ones(BYTES // 4)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.note = [torch.ones(4)]
    return tensor


def refuse(gradient: Any) -> None:
    raise AssertionError("a hook of the released tensor ran")


def hooked() -> torch.Tensor:
    tensor = torch.ones(4, requires_grad=True)
    tensor.register_hook(refuse)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(100),
    "pending": lambda: torch.ones(4, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "inference": inference,
    "with an attribute": with_attribute,
    "hooked": hooked,
    "numpy": lambda: torch.from_numpy(np.ones(100)),
    "shared": lambda: torch.ones(100).share_memory_(),
    "bfloat16": lambda: torch.ones(100, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8),
}
SOME_WARN = pytest.mark.filterwarnings(
    "ignore:.*quantized",  # torch announces their end.
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


@SOME_WARN
@pytest.mark.parametrize("kind", KINDS)
def test_released_tensor_is_empty(kind: str) -> None:
    alone, among = KINDS[kind](), KINDS[kind]()
    before = (alone.dtype, alone.device, alone.is_inference())
    others = [torch.ones(4) for _ in range(9)]
    others[0].grad = torch.ones(4)
    assert release(alone).errors == ()
    assert release([*others[:4], among, *others[4:], None, among]).errors == ()
    for tensor in (*others, alone, among):
        assert tensor.numel() == 0
        assert not vars(tensor)
        assert tensor.grad is None
    for tensor in (alone, among):
        assert (tensor.dtype, tensor.device, tensor.is_inference()) == before
    for what in ("shape", "requires_grad", "is_leaf", "is_quantized"):
        assert getattr(among, what) == getattr(alone, what), what
    if kind == "hooked":
        (alone.sum() + among.sum()).backward()
    others[0].resize_(3).fill_(1)  # None of them shares its memory with another.
    others[1].resize_(3).fill_(2)
    assert others[0].tolist() == [1, 1, 1]


@SOME_WARN
def test_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(5), torch.ones(2)])
    with pytest.raises(TypeError, match="It is a nested tensor"):
        release(nested)
    assert [t.sum().item() for t in nested.unbind()] == [5, 2]


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        wrapper = MAKE_WRAPPER(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **more: Any) -> Any:
        raise AssertionError("the program's own code was run")


BEHIND: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda base: base[:1],
    Wrapper,
    lambda inner: (inner.requires_grad_() * inner).sum(),
]


def test_released_tensor_drops_its_base_inner_tensor_or_graph() -> None:
    for make in BEHIND:
        inner = big()
        storages = weak(inner)
        tensor = make(inner)
        del inner
        release(tensor)
        assert gone(storages)


def test_report_names_tensors_by_their_path() -> None:
    made = {"a": torch.ones(1000), "b": [torch.ones(1000) for _ in range(3)]}
    kept, made["a"].grad = made["b"][1].numpy(), torch.ones(1000)
    gradient = made["a"].grad
    report = release(made, trim_host=False)
    assert sorted(held.what for held in report.still_held) == ["dict['a'].grad", "dict['b'][1]"]
    assert report.freed_bytes["host"] == 3 * 4000
    assert kept.sum() == gradient.sum() == 1000


def test_tensor_that_retains_its_gradient_is_refused_with_advice() -> None:
    activations = torch.ones(4, requires_grad=True) * 2
    activations.retain_grad()
    activations.sum().backward()
    (error,) = release(activations).errors
    assert "retain_grad() was called on it; use `del`" in str(error)
    assert activations.grad is None
