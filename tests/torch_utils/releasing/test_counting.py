"""Tests of the bytes that a report counts."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, operator, union-attr"

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_utils import release

BYTES = 4_000_000

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.


def big() -> torch.Tensor:
    return torch.ones(BYTES // 4)


class Slotted(nn.Module):
    __slots__ = ("kept",)


def in_slot() -> nn.Module:
    module = Slotted()
    module.kept = big()
    return module


def in_cache() -> nn.Module:
    from transformers import DynamicCache

    module = nn.Module()
    module.cache = DynamicCache()
    module.cache.update(big().view(1, 1, 1000, -1), torch.ones(1, 1, 1, 1), 0)
    return module


def in_nested_containers() -> nn.Module:
    module = nn.Module()
    module.kept = OrderedDict(a=[({"b": big()},)])
    return module


def in_unregistered_layer() -> nn.Module:
    module = nn.Module()
    module.hidden = [nn.Linear(1, BYTES // 4, bias=False)]
    return module


def in_attribute_of_a_parameter() -> nn.Module:
    module = nn.Linear(1, 1)
    module.weight.main_grad = big()
    return module


PLACES = [
    *(in_slot, in_cache, in_nested_containers),
    *(in_unregistered_layer, in_attribute_of_a_parameter),
]


@pytest.mark.parametrize("make", PLACES)
def test_freed_bytes_count_tensors_in_any_container(make: Callable[[], nn.Module]) -> None:
    report = release(make())
    assert report.errors == ()
    assert 0 <= report.freed_bytes["host"] - BYTES < 1000
    assert report.still_held == ()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
@pytest.mark.parametrize(
    "make", [torch.from_numpy, lambda array: torch.frombuffer(array, dtype=torch.float32)]
)
def test_memory_of_a_live_array_is_not_counted_as_freed(make: Any) -> None:
    array = np.ones(10_000_000, np.float32)
    report = release(make(array))
    assert report.freed_bytes.get("host", 0) == 0
    (held,) = report.still_held
    assert held.nbytes == 40_000_000
    assert held.holders == ("the array or buffer that it was made from",)
    assert array.sum() == 10_000_000
    # The control: this array is nobody else's, and its memory goes with the tensor.
    report = release(make(np.ones(10_000_000, np.float32)))
    assert report.freed_bytes == {"host": 40_000_000}
    assert report.still_held == ()


def test_report_of_an_optimizer_or_loader_alone_leaves_out_what_others_own() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    report = release(optimizer)
    assert report.still_held == ()
    assert report.freed_bytes == {"host": 2 * 288 + 8}
    loader = DataLoader(TensorDataset(big()))
    assert release(loader).still_held == ()
    assert model(torch.ones(1, 8)).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_report_of_a_quantized_model_does_not_say_that_nothing_was_freed() -> None:
    layer = nn.Sequential(nn.Linear(4096, 4096))
    model = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    report = release(model)
    assert "nothing" not in str(report)
    assert report.before.host.rss_bytes - report.after.host.rss_bytes > 0.9 * 4096 * 4096
