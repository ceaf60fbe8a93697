"""Modules are buried in steps; whichever of them an interrupt breaks off, the next call goes on."""

from __future__ import annotations

import gc

import pytest
import torch
from interrupts import everywhere, run_interrupted
from torch import nn

from torch_utils import ReleasedError, release
from torch_utils._releasing.modules import ModuleTarget
from torch_utils._releasing.tombstone import Epitaph, bury


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_giving_up_is_finished_by_another_call(step: int) -> None:
    """Interrupted at any instruction, the next call does the rest, on a layer with slots too."""

    class Slotted(nn.Linear):
        __slots__ = ("more",)

    def interrupted(number: int) -> bool:
        model = nn.Sequential(nn.Linear(4, 4), Slotted(4, 4), nn.Sequential(nn.Linear(4, 4)))
        layers = list(model.modules())
        held = [vars(layer) for layer in layers]
        target = ModuleTarget(model, "model")
        was_reached, _ = run_interrupted(
            lambda: target.give_up("here"), number, "modules.py", "tombstone.py"
        )
        target.give_up("here")
        for layer, contents in zip(layers, held, strict=True):
            assert "_parameters" not in contents
            with pytest.raises(ReleasedError, match="was released here"):
                layer(torch.ones(2, 4))
        return was_reached

    assert everywhere(interrupted, step) > 30


def test_names_of_many() -> None:
    """Layers that were buried together each have a name of their own, whatever became of others."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(600))
    layers = [model[0], model[300], model[599]]
    release(model, trim_host=False)
    del model
    gc.collect()
    for layer, number in zip(layers, ("0", "300", "599"), strict=True):
        assert repr(layer) == f"<released {number!r} of ModuleList (a Linear)>"
        with pytest.raises(ReleasedError, match=f"^'{number}' of ModuleList"):
            layer(torch.ones(1, 2))
        assert isinstance(layer, nn.Linear)


def test_what_is_left_is_shared() -> None:
    """What is left does not grow with the model: layers of a class share one dictionary."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(100))
    layers = list(model)
    release(model, trim_host=False)
    left = {id(object.__getattribute__(layer, "__dict__")) for layer in layers}
    assert len(left) == 1
    other = nn.Linear(2, 2)
    bury(other, "this Linear", "here")  # The control: alone, each has its own.
    contents = object.__getattribute__(other, "__dict__")
    assert id(contents) not in left
    assert [type(value) for value in contents.values()] == [Epitaph]
