"""Tests of the release of all layers of torch.nn and of real models."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, dict-item, operator, return-value, union-attr"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import gone, weak
from torch_utils import ReleasedError, release

pytestmark = pytest.mark.usefixtures("frozen_heap")

# Arguments that make a small layer, tried in this order.
TRANSFORMERS = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


IDS, INPUTS = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "gpt2": (gpt2, lambda model: model.generate(IDS, max_new_tokens=2, pad_token_id=0)),
    "compiled": (
        lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
        lambda model: model(INPUTS),
    ),
    "scripted": (
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        lambda model: model(INPUTS),
    ),
}


@TRANSFORMERS
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
    "ignore:.*Converting a tensor.*",
)
@pytest.mark.parametrize("kind", MODELS)
def test_model_raises_on_use_after_release(kind: str) -> None:
    make, use = MODELS[kind]
    model = make()
    with torch.no_grad():
        use(model)
    weights = weak(model)
    report = release(model)
    assert not report.errors
    assert not report.still_held
    assert gone(weights)
    with pytest.raises(ReleasedError, match="was released"):
        use(model)


@TRANSFORMERS
def test_sentence_transformer_is_freed_without_collection(tiny_model: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny_model), device="cpu")
    model.encode(["how do I give memory back"])
    weights = weak(model)
    assert not release(model, collect="never").still_held
    assert gone(weights)
    for use in (lambda: model.encode("a"), lambda: model[0], model.__class__.__len__):
        with pytest.raises((ReleasedError, TypeError)):
            use()
