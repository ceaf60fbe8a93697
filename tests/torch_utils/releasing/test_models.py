"""Tests of the release of all layers of torch.nn and of real models."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, dict-item, operator, return-value, union-attr"

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from support.releasing import gone, weak
from torch_utils import ReleasedError, release

# Arguments that make a small layer, tried in this order.
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (),
    (2,),
    (2, 2),
    (2, 2, 2),
    (2, 2, 2, 2),
    (4, 2, 2, 2),
    (4, 4, [2, 4]),
    (nn.TransformerEncoderLayer(4, 2, 8), 1),
    (nn.TransformerDecoderLayer(4, 2, 8), 1),
)
SMALLER = {"Transformer": (4, 2, 1, 1, 8)}  # Without arguments it has 44 million weights.
KINDS_OF_LAYER = [
    name
    for name in sorted(dir(nn))
    if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module)
]
LAYER_INPUTS = [torch.ones(shape) for shape in ((2,), (1, 2), (1, 2, 2), (1, 2, 4, 4))]


def make_layers() -> dict[str, Any]:
    """Build one layer of each class that takes small arguments."""
    made: dict[str, Any] = {}
    for name in KINDS_OF_LAYER:
        for arguments in (SMALLER[name],) if name in SMALLER else ARGUMENTS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made[name] = getattr(nn, name)(*arguments)
                break
            except Exception:  # Layers refuse arguments that are not theirs as they like.
                continue
    return made


LAYERS = make_layers()


def test_nearly_all_layers_of_torch_are_covered() -> None:
    assert len(LAYERS) > 0.95 * len(KINDS_OF_LAYER), sorted({*KINDS_OF_LAYER} - {*LAYERS})


@pytest.mark.parametrize("name", LAYERS)
def test_released_layer_raises_on_call(name: str) -> None:
    layer = LAYERS[name]
    tensors = chain(layer.parameters(), layer.buffers())
    storages = weak(
        *(t for t in tensors if not isinstance(t, UninitializedTensorMixin) and t.numel())
    )
    release(layer, collect="never", trim_host=False)
    assert not storages or gone(storages)  # Many layers have no weights.
    for inputs in ([], *([i] for i in LAYER_INPUTS), *([i, i] for i in LAYER_INPUTS)):
        for use in (layer, layer.__call__):
            with pytest.raises(ReleasedError, match=f"this {name} was released"):
                use(*inputs)
    with pytest.raises(ReleasedError):
        layer.extra_repr()


TRANSFORMERS = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


def bert_in_half() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=64, hidden_size=16, **sizes)
    return BertForSequenceClassification(config).to(torch.bfloat16).eval()


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    # Hooks that refer to the model make cycles through it.
    model.register_forward_hook(lambda module, args, out: model(out) if out is None else None)
    model[0].register_forward_pre_hook(lambda module, args: None)
    model[0].weight.register_hook(lambda gradient: model and gradient)
    return model


IDS, INPUTS = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "gpt2": (gpt2, lambda model: model.generate(IDS, max_new_tokens=2, pad_token_id=0)),
    "t5": (t5, lambda model: model(input_ids=IDS, decoder_input_ids=IDS)),
    "bert in half": (bert_in_half, lambda model: model(IDS)),
    "compiled": (
        lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
        lambda model: model(INPUTS),
    ),
    "hooked": (hooked, lambda model: model(INPUTS)),
    "traced": (
        lambda: torch.jit.trace(nn.Linear(4, 4), INPUTS, check_trace=False),
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
def test_tied_weights_count_once() -> None:
    model = gpt2()
    storages = [t.untyped_storage() for t in chain(model.parameters(), model.buffers())]
    unique = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del storages
    assert release(model).freed_bytes == {"host": sum(unique.values())}


@TRANSFORMERS
def test_embedding_tied_to_a_live_model_stays() -> None:
    first, second = t5(), t5()
    second.shared = second.encoder.embed_tokens = second.decoder.embed_tokens = first.shared
    expected = second(input_ids=IDS, decoder_input_ids=IDS).logits
    release(first)
    again = second(input_ids=IDS, decoder_input_ids=IDS).logits
    torch.testing.assert_close(again, expected)


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


@pytest.mark.slow
def test_thorough_release_frees_compiled_model() -> None:
    model = nn.Linear(32, 32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(torch.ones(1, 32))
    weights = weak(model)
    release(compiled, thorough=True)
    assert gone(weights)
    for use in (compiled, model):
        with pytest.raises(ReleasedError, match="was released"):
            use(torch.ones(1, 32))


def test_release_unmaps_a_tensor_and_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.arange(100_000, dtype=np.float32).tofile(path)
    tensor = torch.from_file(str(path), shared=True, size=100_000)
    assert path.name in Path("/proc/self/maps").read_text()
    assert not release(tensor).errors
    assert tensor.numel() == 0
    assert path.name not in Path("/proc/self/maps").read_text()
    assert np.fromfile(path, dtype=np.float32)[-1] == 99_999


def test_release_unmaps_weights_of_torch_load(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(64, 64)}, tmp_path / "model.pt")
    module = nn.Linear(64, 64, bias=False)
    state = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True)
    module.load_state_dict(state, assign=True)
    del state
    assert "model.pt" in Path("/proc/self/maps").read_text()
    assert not release(module).still_held
    assert "model.pt" not in Path("/proc/self/maps").read_text()
