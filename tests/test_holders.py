"""The report names who still holds memory that was given up."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from programs import assert_clean, run
from torch import nn

from torch_utils import release

LONG = {"search_s": 10.0}


def holders(report: Any) -> str:
    (held,) = report.still_held
    return " and ".join(held.holders)


def test_another_module() -> None:
    """A weight that is tied to a live module."""
    live, gone = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    gone.weight = live.weight
    assert "another module (Linear)" in holders(release(gone, **LONG))
    del live


def test_an_optimizer() -> None:
    """A parameter that an optimizer still updates."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "an optimizer (SGD)" in holders(release(model, **LONG))
    del optimizer


def test_a_frame() -> None:
    """A variable of a function that is running, by its name."""
    model = nn.Linear(8, 8, bias=False)
    my_weight = model.weight
    named = holders(release(model, **LONG))
    assert "the variable 'my_weight' of test_a_frame()" in named
    del my_weight


def test_a_frame_that_an_exception_keeps() -> None:
    """The frame of a function that failed, kept by its exception."""

    def fail(model: nn.Module) -> None:
        weight = model.weight
        raise ValueError(weight.shape)

    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(ValueError) as caught:
        fail(model)
    assert "a frame of fail()" in holders(release(model, **LONG))
    del caught


def test_an_autograd_graph() -> None:
    """A graph that has saved the weight for its backward pass."""
    model = nn.Linear(8, 8, bias=False)
    loss = model(torch.ones(1, 8, requires_grad=True)).sum()
    assert "an autograd graph" in holders(release(model, **LONG))
    del loss


def test_a_numpy_view() -> None:
    """An array over a tensor's memory."""
    tensor = torch.ones(100)
    array = tensor.numpy()
    assert "a numpy view" in holders(release(tensor, **LONG))
    assert array.sum() == 100


def test_a_frozen_cycle() -> None:
    """A cycle that gc.freeze has put aside is never collected, and that is said."""
    program = """
    import gc, torch
    from torch_utils import release
    class Holder: pass
    model = torch.nn.Linear(8, 8, bias=False)
    holder = Holder(); holder.me = holder; holder.weight = model.weight
    gc.freeze(); del holder
    report = release(model, search_s=10)
    assert "gc.freeze()" in " ".join(report.still_held[0].holders), report
    """
    assert_clean(run(program))


def test_search_is_bounded() -> None:
    """A heap too large for the time allowed is not walked; what survived is still said."""
    tensor = torch.ones(100)
    view = tensor[1:]
    report = release(tensor, search_s=0.0)
    assert report.still_held[0].holders == ()
    assert "something that was not found" in str(report)
    del view
    gc.collect()
