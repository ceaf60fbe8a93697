"""Submodules that a live model shares: found whatever holds them, and left whole."""

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
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import ReleasedError, release

INPUTS = torch.ones(1, 4)


class OwnDict(dict):  # type: ignore[type-arg]
    """A dictionary of somebody's own, which must not be asked."""

    def items(self) -> Any:
        raise AssertionError("the program's own code was run")

    values = __iter__ = __len__ = items  # type: ignore[assignment]


class OwnMapping(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dictionary at all."""

    def __iter__(self) -> Any:
        raise AssertionError("the program's own code was run")

    __len__ = __contains__ = __iter__  # type: ignore[assignment]


class Live(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return vars(self)["get"]()(inputs)


def live_with(encoder: nn.Module, mapping: Callable[[], Any]) -> nn.Module:
    """Make a live module whose submodules are in a mapping of the given kind."""
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
def test_shared_whatever_holds_it(mapping: Any, ours: Any) -> None:
    """The live model computes what it did before, and the report says what lives on."""
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


def test_control_unshared_goes() -> None:
    """Without the live model the same submodule is released, whoever else names it."""
    encoder = nn.Sequential(nn.Linear(4, 4))
    gone = nn.ModuleDict({"encoder": encoder})
    layers, names = list(gone.modules()), dict(gone.named_modules())
    assert release(gone).freed_bytes == {"host": 80}
    assert len(layers) == len(names)
    with pytest.raises(ReleasedError):
        encoder(INPUTS)


def test_what_the_interpreter_froze_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with some hundred frozen objects, none of which is a program's."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    test_control_unshared_goes()


@dataclass
class Record:
    module: Any


class Slotted(nn.Module):
    __slots__ = ("hidden",)


HOLDS: dict[str, Any] = {
    "itself": lambda e: e,
    "list": lambda e: [e],
    "deep": lambda e: {"a": [{"b": (e,)}]},
    "mapping": lambda e: OwnMapping(encoder=e),
    "chain of mappings": lambda e: ChainMap({"encoder": e}),
    "mapping proxy": lambda e: MappingProxyType({"encoder": e}),
    "dataclass": Record,
    "namespace": lambda e: SimpleNamespace(encoder=e),
    "method": lambda e: e.forward,
    "partial": lambda e: partial(e.__call__, INPUTS),
    "closure": lambda e: lambda: e(INPUTS),
    "default": lambda e: lambda inputs, module=e: module(inputs),
}


def encoder_for_each_way() -> dict[str, nn.Module]:
    """One for each, so that one walk of the heap does for all."""
    return {name: nn.Sequential(nn.Linear(4, 4)) for name in HOLDS}


def computes(encoder: nn.Module) -> bool:
    try:
        return encoder(INPUTS).shape == (1, 4)
    except ReleasedError:
        return False


@pytest.mark.parametrize("kind", [nn.Module, pytest.param(Slotted, marks=pytest.mark.slow)])
def test_shared_through_an_attribute(kind: Any) -> None:
    """A live module may keep a submodule unregistered, and still compute with it."""
    encoders = encoder_for_each_way()
    live = {name: kind() for name in HOLDS}
    for name, module in live.items():  # Each by a module of its own.
        object.__setattr__(module, "hidden", HOLDS[name](encoders[name]))
    report = release(nn.ModuleDict(encoders))
    assert [name for name in HOLDS if not computes(encoders[name])] == []
    assert len(report.still_held) == 2 * len(HOLDS)


def test_control_no_module_has_it() -> None:
    """The same where only a variable has it."""
    encoders = encoder_for_each_way()
    hidden = {name: HOLDS[name](encoder) for name, encoder in encoders.items()}
    report = release(nn.ModuleDict(encoders))
    assert [name for name in hidden if computes(encoders[name])] == []
    assert report.freed_bytes == {"host": 80 * len(HOLDS)}


def test_what_lies_below_a_shared_one_stays() -> None:
    """Even where the released model contains that directly as well."""
    layer = nn.Linear(4, 4)
    block = nn.Sequential(layer)
    live = nn.Sequential(block)
    before = live(INPUTS)
    release(nn.ModuleDict({"block": block, "layer": layer}))
    assert torch.equal(live(INPUTS), before)


def test_shallow_copy_stays() -> None:
    """It has the very same dictionaries as the model that is released."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    live = copy.copy(model)
    before = live(INPUTS)
    release(model)
    assert torch.equal(live(INPUTS), before)


def test_frozen_model_stays() -> None:
    """The garbage collector does not show what `gc.freeze` has put aside."""
    encoder = nn.Linear(4, 4)
    live = nn.Sequential(encoder)
    gc.freeze()
    try:
        release(nn.ModuleDict({"encoder": encoder}))
    finally:
        gc.unfreeze()
    assert live(INPUTS).shape == (1, 4)


def test_garbage_that_shares_is_named_or_gone() -> None:
    """A model in a cycle nobody can reach: its share is freed, or the report says it is held."""
    encoder = nn.Linear(100, 100)
    weight = StorageWeakRef(encoder.weight.untyped_storage())
    garbage = nn.Sequential(encoder)
    garbage.me = [garbage]
    del garbage
    gone = nn.ModuleDict({"encoder": encoder})
    del encoder
    report = release(gone)
    assert weight.expired() == (report.freed_bytes["host"] == 40_400)
    assert weight.expired() or report.still_held_bytes == 40_400


def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every walk of the heap."""
    seen: list[str] = []
    for name in ("get_referrers", "get_objects", "collect"):
        original = getattr(gc, name)
        monkeypatch.setattr(
            gc, name, lambda *a, _o=original, _n=name, **k: (seen.append(_n), _o(*a, **k))[1]
        )
    return seen


def hundred() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))


class Average:
    """Follows the parameters of a model that it does not own."""

    def __init__(self, model: nn.Module) -> None:
        self.followed = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.followed]


def test_parameters_that_an_object_only_holds_stay() -> None:
    """They are the live model's; the object's own go, and the report names who has them."""
    model = nn.Linear(4, 4)
    average = Average(model)
    report = release(average, search_s=60)
    assert report.freed_bytes == {"host": 80}
    assert {held.holders for held in report.still_held} == {("another module (Linear)",)}
    assert model(INPUTS).shape == (1, 4)
    assert release(average, model).freed_bytes == {"host": 80}
    assert [parameter.numel() for parameter in average.followed] == [0, 0]


def test_control_parameters_that_no_module_has_go() -> None:
    """Or that the caller names."""
    average = Average(nn.Linear(4, 4))  # An assertion would keep the model.
    assert release(average).freed_bytes == {"host": 160}
    model = nn.Linear(4, 4)
    for objects in ((Average(model), model.weight), (model.bias, Average(model))):
        release(*objects)
    assert [parameter.numel() for parameter in model.parameters()] == [0, 0]


def test_parameters_of_a_frozen_model_stay() -> None:
    """It cannot be listed, so nobody can say that it is not there."""
    model = nn.Linear(4, 4)
    average = Average(model)
    gc.collect()
    gc.freeze()
    try:
        release(average)
    finally:
        gc.unfreeze()
    assert model(INPUTS).shape == (1, 4)


def test_an_exported_program_leaves_its_model() -> None:
    """`torch.export` keeps the very parameters."""
    model = nn.Linear(4, 4)
    program = torch.export.export(model, (INPUTS.clone(),))
    expected = model(INPUTS)
    release(program)
    assert torch.equal(model(INPUTS), expected)


def test_one_walk_for_all_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred layers, and a list of them."""
    model = hundred()
    layers = list(model)
    seen = walks(monkeypatch)
    release(model, trim_host=False)
    assert len(seen) <= 2
    assert len(layers) == 100


def test_no_walk_without_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting references is enough, also beside accelerate's hooks."""
    hooks = pytest.importorskip("accelerate.hooks")

    model = hundred()
    for layer in model:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    del layer
    seen = walks(monkeypatch)
    release(model, trim_host=False)
    assert seen == []
