"""drop_pages: only what nobody else can ever see, and other threads go on meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torch_utils import memory_snapshot, release
from torch_utils._releasing.pages import LARGE_BYTES, drop_pages

COUNT = LARGE_BYTES  # bytes: one element each, and one page more


def module_with(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("big", tensor)
    return module


def large() -> torch.Tensor:
    return torch.ones(COUNT + 4096, dtype=torch.uint8)


def test_pages_go_where_it_is_alone() -> None:
    """The memory is back before the tensor itself is."""
    tensor = large()
    before = memory_snapshot()
    dropped = drop_pages(torch, tensor)  # not in an assert, which holds a reference of its own
    assert dropped
    assert (before - memory_snapshot()).host.rss_bytes > 0.9 * COUNT


def graph() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT // 4 + 1024, requires_grad=True)
    return tensor, (tensor * tensor).sum()


def as_numpy() -> tuple[torch.Tensor, Any]:
    tensor = large()
    return tensor, tensor.numpy()


def from_numpy() -> tuple[torch.Tensor, Any]:
    array = np.ones(COUNT + 4096, np.uint8)
    return torch.from_numpy(array), array


def view() -> tuple[torch.Tensor, Any]:
    tensor = large()
    return tensor, tensor[5:]


def storage() -> tuple[torch.Tensor, Any]:
    tensor = large()
    return tensor, tensor.untyped_storage()


def shared() -> tuple[torch.Tensor, Any]:
    tensor = large().share_memory_()
    return tensor, None


def variable() -> tuple[torch.Tensor, Any]:
    tensor = large()
    return tensor, tensor


def data() -> tuple[torch.Tensor, Any]:
    tensor = nn.Parameter(torch.ones(COUNT // 4 + 1024))
    return tensor, tensor.data


@pytest.mark.parametrize("make", [graph, as_numpy, from_numpy, view, storage, shared, data])
def test_pages_stay_where_somebody_else_holds_them(make: Any) -> None:
    """A graph, an array, a view, the storage, another process: nothing is dropped."""
    tensor, other = make()
    dropped = drop_pages(torch, tensor)
    assert dropped is False
    assert tensor.min() == 1
    del other


@pytest.mark.parametrize("make", [as_numpy, from_numpy, view, storage, variable, data])
def test_what_others_hold_is_right_after_a_release(make: Any) -> None:
    """The same, seen from outside: after the module is released the other still reads ones."""
    tensor, other = make()
    module = module_with(tensor)
    del tensor
    release(module)
    values = other
    if isinstance(other, torch.UntypedStorage):
        values = torch.empty(0, dtype=torch.uint8).set_(other)
    assert min(values[:100].tolist()) == min(values[-100:].tolist()) == 1


def test_pending_graph_still_computes() -> None:
    """A gradient that needs a released parameter comes out right."""
    layer = nn.Linear(2048, 2048, bias=False)
    nn.init.ones_(layer.weight)
    inputs = torch.ones(1, 2048, requires_grad=True)
    loss = layer(inputs).sum()
    report = release(layer)
    assert [held.what for held in report.still_held] == ["Linear.weight"]
    loss.backward()
    assert torch.equal(inputs.grad, torch.full((1, 2048), 2048.0))


def test_without_the_private_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that lacks them frees as it always did."""
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    tensor = large()
    dropped = drop_pages(torch, tensor)
    assert dropped is False
    before = memory_snapshot()
    module = module_with(large())
    release(module)
    assert (memory_snapshot() - before).host.rss_bytes < COUNT / 2
