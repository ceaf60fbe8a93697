"""Tests of what a released object shares with objects outside."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, index, list-item, union-attr"

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from support.releasing import gone, weak, without_collector
from torch_utils import ReleasedError, release

INPUTS = torch.ones(1, 4)


def test_shared_submodule_stays() -> None:
    encoder, head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    gone = nn.ModuleDict({"encoder": encoder, "head": head})
    live = nn.Sequential(encoder)
    del encoder
    before = live(INPUTS)
    report = release(gone)
    assert report.errors == ()
    assert torch.equal(live(INPUTS), before)
    assert report.freed_bytes == {"host": 80}
    assert sorted(held.what for held in report.still_held) == [
        "ModuleDict.encoder.0.bias",
        "ModuleDict.encoder.0.weight",
    ]
    with pytest.raises(ReleasedError):
        head(INPUTS)


@dataclass
class Record:
    module: Any


class Slotted(nn.Module):
    __slots__ = ("hidden",)


class Plain:
    pass


HOLDS: dict[str, Any] = {
    "itself": lambda e: e,
    "list": lambda e: [e],
    "mapping": lambda e: UserDict(encoder=e),
    "mapping proxy": lambda e: MappingProxyType({"encoder": e}),
    "dataclass": Record,
    "method": lambda e: e.forward,
    "partial": lambda e: partial(e.__call__, INPUTS),
}


def make_encoders() -> dict[str, nn.Module]:
    """Make one encoder for each case, so that one search of the heap covers all."""
    return {name: nn.Sequential(nn.Linear(4, 4)) for name in HOLDS}


def computes(encoder: nn.Module) -> bool:
    try:
        return encoder(INPUTS).shape == (1, 4)
    except ReleasedError:
        return False


@pytest.mark.parametrize("kind", [nn.Module, Plain, pytest.param(Slotted, marks=pytest.mark.slow)])
def test_submodule_in_an_attribute_of_a_live_object_stays(kind: Any) -> None:
    encoders = make_encoders()
    live = [kind() for _ in HOLDS]
    for thing, name in zip(live, HOLDS, strict=True):
        object.__setattr__(thing, "hidden", HOLDS[name](encoders[name]))
    report = release(nn.ModuleDict(encoders))
    assert [name for name in HOLDS if not computes(encoders[name])] == []
    assert len(report.still_held) == 2 * len(live)


def test_variables_do_not_keep_a_submodule() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(7))
    itself, listed, mapped, entry = model[0], [model[1]], {"a": model[2]}, (model[3],)
    method, called, closure = model[4].forward, partial(model[5], INPUTS), in_a_closure(model[6])
    assert release(model).freed_bytes == {"host": 80 * 7}
    for use in (itself, listed[0], mapped["a"], entry[0], method, called, closure):
        with pytest.raises(ReleasedError):
            use(INPUTS)


def in_a_closure(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda inputs: module(inputs)


def test_shallow_copy_of_a_released_model_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    live = copy.copy(model)
    before = live(INPUTS)
    release(model)
    assert torch.equal(live(INPUTS), before)


def test_object_around_a_layer_of_a_live_model_leaves_it_whole() -> None:
    class Recorder:
        def __init__(self, layer: nn.Module) -> None:
            self.layer = layer
            self.seen: list[torch.Tensor] = []
            self.hook = layer.register_forward_hook(self.record)

        def record(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
            self.seen.append(output.detach())

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    recorder = Recorder(model[0])
    expected = model(INPUTS)
    storages = weak(*recorder.seen)
    release(recorder)
    assert gone(storages)
    assert torch.equal(model(INPUTS), expected)


def test_base_of_two_adapters_stays_with_the_other() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.base(inputs) + self.low(inputs)

    base = nn.Linear(4, 4)
    ours, other = Adapter(base), Adapter(base)
    expected, storages = other(INPUTS), weak(ours.low)
    release(ours)
    assert gone(storages)
    assert torch.equal(other(INPUTS), expected)


class Searcher:
    """Refers to tensors in attributes, of which some are a model's parameters."""

    def __init__(self, table: torch.Tensor, *parameters: torch.Tensor) -> None:
        self.table = table
        self.lists = {"parameters": [*parameters], "cache": (torch.ones(4), "text")}


def test_tensors_of_an_object_are_let_go_and_keep_their_values() -> None:
    table, model = torch.ones(100), nn.Linear(4, 4)
    ours, other = Searcher(table, *model.parameters()), Searcher(table)
    lists = other.lists = ours.lists
    expected = model(INPUTS)
    with without_collector():
        report = release(ours)
    assert [held.nbytes for held in report.still_held] == [400, 64, 16, 16]
    assert (ours.table.numel(), ours.lists["cache"][1]) == (0, "text")
    assert [tensor.numel() for tensor in ours.lists["parameters"]] == [0, 0]
    assert other.table.sum() == 100
    assert other.lists is lists
    assert lists["cache"][0].sum() == 4
    assert torch.equal(model(INPUTS), expected)


def test_tensors_that_only_the_object_holds_are_freed() -> None:
    searcher = Searcher(torch.ones(100), torch.ones(4))
    with without_collector():
        assert release(searcher, collect="never").freed_bytes == {"host": 400 + 16 + 16}


def test_tensor_that_is_passed_as_well_is_emptied() -> None:
    table = torch.ones(100)
    ours, other = Searcher(table), Searcher(table)
    release(ours, [table])
    assert (ours.table.numel(), other.table.numel()) == (0, 0)


def test_parameter_shared_with_a_live_model_stays() -> None:
    kept, released = nn.Linear(4, 4), nn.Linear(4, 4)
    released.weight = kept.weight
    before = kept(INPUTS)
    report = release(released)
    assert torch.equal(kept(INPUTS), before)
    assert [held.what for held in report.still_held] == ["Linear.weight"]
