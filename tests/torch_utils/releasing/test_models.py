"""Tests of the release of compiled, scripted and pretrained models."""

# Torch has no types for what these make.
# mypy: disable-error-code="dict-item, operator, return-value"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import gone, weak
from torch_utils import ReleasedError, release

pytestmark = pytest.mark.usefixtures("frozen_heap")
INPUTS = torch.ones(1, 4)


def sentence_transformer(folder: Path) -> nn.Module:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


# How each is made and used, and the collections that its release needs.
MODELS: dict[str, tuple[Callable[[Path], nn.Module], Callable[[Any], Any], Any]] = {
    "sentence-transformers": (sentence_transformer, lambda model: model.encode("a"), "never"),
    "compiled": (
        lambda folder: torch.compile(nn.Linear(4, 4), backend="eager"),
        lambda model: model(INPUTS),
        "never",
    ),
    "scripted": (
        lambda folder: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        lambda model: model(INPUTS),
        "auto",
    ),
}


@pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
    "ignore:.*Converting a tensor.*",
)
@pytest.mark.parametrize("kind", MODELS)
def test_model_is_freed_and_raises_on_use(kind: str, tiny_model: Path) -> None:
    make, use, collect = MODELS[kind]
    model = make(tiny_model)
    with torch.no_grad():
        use(model)
    weights = weak(model)
    report = release(model, collect=collect)
    assert (report.errors, report.still_held) == ((), ())
    assert gone(weights)
    with pytest.raises(ReleasedError, match="was released"):
        use(model)
