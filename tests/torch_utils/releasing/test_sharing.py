"""Tests of submodules and parameters that a live model shares."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, index, list-item"

from __future__ import annotations

import copy
import gc
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.programs import assert_clean, run_forked
from support.releasing import release_and_search, weak
from torch_utils import ReleasedError, release

INPUTS = torch.ones(1, 4)
KEPT: dict[str, Any] = {}
"""What a variable holds that is found in every version of Python: one of a module."""


class OwnDict(dict):
    """A subclass of dict with methods that must not be called."""

    def items(self) -> Any:
        raise AssertionError("the program's own code was run")

    values = __iter__ = __len__ = items


class OwnMapping(UserDict):
    """A mapping that does not derive from dict."""

    def __iter__(self) -> Any:
        raise AssertionError("the program's own code was run")

    __len__ = __contains__ = __iter__


class Live(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return vars(self)["get"]()(inputs)


def live_with(encoder: nn.Module, mapping: Callable[[], Any]) -> nn.Module:
    """Make a live module with its submodules in a mapping of this class."""
    live = Live()
    modules = mapping()
    if isinstance(modules, OwnMapping):
        modules.data["encoder"] = encoder
        vars(live)["get"] = lambda: modules.data["encoder"]
    else:
        dict.__setitem__(modules, "encoder", encoder)
        vars(live)["get"] = lambda: dict.__getitem__(modules, "encoder")
    vars(live)["_modules"] = modules
    return live


@pytest.mark.parametrize("mapping", [dict, OrderedDict, OwnDict, OwnMapping])
@pytest.mark.parametrize("ours", [dict, pytest.param(OrderedDict, marks=pytest.mark.slow)])
def test_shared_submodule_stays_in_any_mapping(mapping: Any, ours: Any) -> None:
    encoder, head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    gone = nn.ModuleDict({"encoder": encoder, "head": head})
    vars(gone)["_modules"] = ours(vars(gone)["_modules"])
    live = live_with(encoder, mapping)
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


def test_control_submodule_of_no_live_module_is_released() -> None:
    encoder = nn.Sequential(nn.Linear(4, 4))
    gone = nn.ModuleDict({"encoder": encoder})
    layers, names = list(gone.modules()), dict(gone.named_modules())
    assert release(gone).freed_bytes == {"host": 80}
    assert len(layers) == len(names)
    with pytest.raises(ReleasedError):
        encoder(INPUTS)


@dataclass
class Record:
    module: Any


class Slotted(nn.Module):
    __slots__ = ("hidden",)


class Table:
    """A mapping that derives from no known class."""

    def __init__(self, encoder: nn.Module) -> None:
        self.entries = {"encoder": encoder}

    def __getitem__(self, name: str) -> nn.Module:
        return self.entries[name]


HOLDS: dict[str, Any] = {
    "itself": lambda e: e,
    "list": lambda e: [e],
    "deep": lambda e: {"a": [{"b": (e,)}]},
    "mapping": lambda e: OwnMapping(encoder=e),
    "chain of mappings": lambda e: ChainMap({"encoder": e}),
    "mapping proxy": lambda e: MappingProxyType({"encoder": e}),
    "dataclass": Record,
    "namespace": lambda e: SimpleNamespace(encoder=e),
}
NOT_LOOKED_INTO: dict[str, Any] = {
    "mapping": Table,
    "method": lambda e: e.forward,
    "partial": lambda e: partial(e.__call__, INPUTS),
    "closure": lambda e: lambda: e(INPUTS),
    "default": lambda e: lambda inputs, module=e: module(inputs),
}


def make_encoders(holds: dict[str, Any]) -> dict[str, nn.Module]:
    """Make one encoder for each case, so that one search of the heap covers all."""
    return {name: nn.Sequential(nn.Linear(4, 4)) for name in holds}


def computes(encoder: nn.Module) -> bool:
    try:
        return encoder(INPUTS).shape == (1, 4)
    except ReleasedError:
        return False


def live_modules(kind: Any, holds: dict[str, Any], encoders: dict[str, nn.Module]) -> list[Any]:
    """Make a live module for each encoder that holds it in an attribute."""
    live = [kind() for _ in holds]
    for module, name in zip(live, holds, strict=True):
        object.__setattr__(module, "hidden", holds[name](encoders[name]))
    return live


@pytest.mark.parametrize("kind", [nn.Module, pytest.param(Slotted, marks=pytest.mark.slow)])
def test_submodule_in_an_attribute_of_a_live_module_stays(kind: Any) -> None:
    """A live module may use a submodule that is not registered."""
    encoders = make_encoders(HOLDS)
    live = live_modules(kind, HOLDS, encoders)
    report = release(nn.ModuleDict(encoders))
    assert [name for name in HOLDS if not computes(encoders[name])] == []
    assert len(report.still_held) == 2 * len(live)


def test_control_submodule_in_a_closure_of_a_live_module_is_released() -> None:
    encoders = make_encoders(NOT_LOOKED_INTO)
    live = live_modules(nn.Module, NOT_LOOKED_INTO, encoders)
    report = release(nn.ModuleDict(encoders))
    assert [name for name in encoders if computes(encoders[name])] == []
    assert report.freed_bytes == {"host": 80 * len(live)}


def test_control_submodule_of_a_variable_is_released() -> None:
    encoders = make_encoders(HOLDS)
    hidden = {name: HOLDS[name](encoder) for name, encoder in encoders.items()}
    report = release(nn.ModuleDict(encoders))
    assert [name for name in hidden if computes(encoders[name])] == []
    assert report.freed_bytes == {"host": 80 * len(HOLDS)}


def test_layers_of_a_shared_submodule_stay() -> None:
    """Even if the released model contains the layers directly as well."""
    layer = nn.Linear(4, 4)
    block = nn.Sequential(layer)
    live = nn.Sequential(block)
    before = live(INPUTS)
    release(nn.ModuleDict({"block": block, "layer": layer}))
    assert torch.equal(live(INPUTS), before)


def test_shallow_copy_of_a_released_model_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    live = copy.copy(model)
    before = live(INPUTS)
    release(model)
    assert torch.equal(live(INPUTS), before)


def test_submodule_of_a_gc_frozen_model_stays() -> None:
    encoder = nn.Linear(4, 4)
    live = nn.Sequential(encoder)
    gc.freeze()
    try:
        release(nn.ModuleDict({"encoder": encoder}))
    finally:
        gc.unfreeze()
    assert live(INPUTS).shape == (1, 4)


def test_submodule_of_unreachable_module_is_freed_or_reported() -> None:
    encoder = nn.Linear(100, 100)
    (weight, _) = weak(encoder)
    garbage = nn.Sequential(encoder)
    garbage.me = [garbage]
    del garbage
    gone = nn.ModuleDict({"encoder": encoder})
    del encoder
    report = release(gone)
    assert weight.expired() == (report.freed_bytes["host"] == 40_400)
    assert weight.expired() or report.still_held_bytes == 40_400


class Average:
    """Refers to the parameters of a model that it does not own."""

    def __init__(self, model: nn.Module) -> None:
        self.followed = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.followed]


def test_parameters_of_a_live_model_in_an_object_stay() -> None:
    model = KEPT["model"] = nn.Linear(4, 4)
    average = Average(model)
    report = release_and_search(average)
    KEPT.clear()
    assert report.freed_bytes == {"host": 80}
    assert {held.holders for held in report.still_held} == {("another module (Linear)",)}
    assert model(INPUTS).shape == (1, 4)
    assert release(average, model).freed_bytes == {"host": 80}
    assert [parameter.numel() for parameter in average.followed] == [0, 0]


def test_control_parameters_of_no_module_are_released() -> None:
    average = Average(nn.Linear(4, 4))  # An assertion would keep the model.
    assert release(average).freed_bytes == {"host": 160}
    model = nn.Linear(4, 4)
    for objects in ((Average(model), model.weight), (model.bias, Average(model))):
        release(*objects)
    assert [parameter.numel() for parameter in model.parameters()] == [0, 0]


def test_parameters_of_a_gc_frozen_model_stay() -> None:
    model = nn.Linear(4, 4)
    average = Average(model)
    gc.collect()
    gc.freeze()
    try:
        release(average)
    finally:
        gc.unfreeze()
    assert model(INPUTS).shape == (1, 4)


@pytest.mark.slow
def test_release_of_exported_program_keeps_its_model() -> None:
    model = nn.Linear(4, 4)
    program = torch.export.export(model, (INPUTS.clone(),))
    expected = model(INPUTS)
    release(program)
    assert torch.equal(model(INPUTS), expected)


def test_parameter_shared_with_a_live_model_stays() -> None:
    kept, released = nn.Linear(4, 4), nn.Linear(4, 4)
    released.weight = kept.weight
    before = kept(INPUTS)
    report = release(released)
    assert torch.equal(kept(INPUTS), before)
    assert [held.what for held in report.still_held] == ["Linear.weight"]


def test_objects_frozen_by_python_itself_do_not_count() -> None:
    program = """
    import gc
    gc.get_freeze_count = lambda: 375  # As there; before anything could have asked.
    from torch import nn
    from torch_utils import release
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"layer": layer})
    variables = [list(model.modules()), dict(model.named_modules())]
    assert release(model).freed_bytes == {"host": 80}
    """
    assert_clean(run_forked(program, quick_end=True))


def test_buffers_and_listed_parameters_of_a_live_model_stay() -> None:
    """An object that refers to them does not own them."""
    live = nn.BatchNorm1d(4)
    object.__setattr__(live, "listed", [nn.Parameter(torch.ones(3))])
    holder = Average(nn.Linear(2, 2))
    holder.followed = [live.running_mean, live.listed[0]]
    holder.averages = [torch.ones(5)]
    release(holder)
    assert [len(tensor) for tensor in (*holder.followed, *holder.averages)] == [4, 3, 0]
    assert live(torch.ones(2, 4)).shape == (2, 4)
