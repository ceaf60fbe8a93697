"""release of real models: every storage goes, and every use afterwards is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import ReleasedError, release

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.


def storages(model: nn.Module) -> list[StorageWeakRef]:
    tensors = [*model.parameters(), *model.buffers()]
    return [StorageWeakRef(t.untyped_storage()) for t in tensors]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


IDS = torch.ones(1, 4, dtype=torch.long)
USES: dict[str, Callable[[Any], Any]] = {
    "gpt2": lambda model: model.generate(IDS, max_new_tokens=2, pad_token_id=0),
    "t5": lambda model: model(input_ids=IDS, decoder_input_ids=IDS),
    "bert in half": lambda model: model(IDS),
    "compiled": lambda model: model(torch.ones(1, 4)),
    "hooked": lambda model: model(torch.ones(1, 4)),
    "traced": lambda model: model(torch.ones(1, 4)),
    "scripted": lambda model: model(torch.ones(1, 4)),
}


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    # Hooks that refer to the model make cycles through it.
    model.register_forward_hook(lambda module, args, out: model(out) if out is None else None)
    model[0].register_forward_pre_hook(lambda module, args: None)
    model[0].weight.register_hook(lambda gradient: model and gradient)
    return model


def bert_in_half() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return BertForSequenceClassification(config).to(torch.bfloat16).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "t5": t5,
    "bert in half": bert_in_half,
    "compiled": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
    "hooked": hooked,
    "traced": lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4), check_trace=False),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
)
@pytest.mark.filterwarnings("ignore:.*Converting a tensor.*")
@pytest.mark.parametrize("kind", MODELS)
def test_used_and_released(kind: str) -> None:
    """Its weights are gone with the variable held; the same call that worked says so."""
    model = MODELS[kind]()
    with torch.no_grad():
        USES[kind](model)
    weights = storages(model)
    report = release(model)
    assert not report.errors
    assert not report.still_held
    assert weights
    assert all(weight.expired() for weight in weights)
    with pytest.raises(ReleasedError, match="was released"):
        USES[kind](model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
)
def test_control_del_of_a_copy_frees_nothing(kind: str) -> None:
    """While the caller holds the variable, dropping another reference gives nothing back."""
    model = MODELS[kind]()
    weights = storages(model)
    other = model
    del other
    assert not any(weight.expired() for weight in weights)


def test_tied_weights_count_once() -> None:
    """GPT-2's output layer is its embedding."""
    model = gpt2()
    unique = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in chain(model.parameters(), model.buffers())
    }
    report = release(model)
    assert report.freed_bytes == {"host": sum(unique.values())}


def test_tied_to_a_live_model() -> None:
    """An encoder that another model contains too stays whole in that one."""
    first, second = t5(), t5()
    second.shared = second.encoder.embed_tokens = second.decoder.embed_tokens = first.shared
    expected = second(input_ids=IDS, decoder_input_ids=IDS).logits
    release(first)
    again = second(input_ids=IDS, decoder_input_ids=IDS).logits
    torch.testing.assert_close(again, expected)


def test_sentence_transformer(tiny_model: Path) -> None:
    """Its model card refers back to it: a cycle, which needs no collection here."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny_model), device="cpu")
    model.encode(["how do I give memory back"])
    weights = storages(model)
    assert not release(model, collect="never").still_held
    assert all(weight.expired() for weight in weights)
    for use in (lambda: model.encode("a"), lambda: model[0], model.__class__.__len__):
        with pytest.raises((ReleasedError, TypeError)):
            use()


def test_cross_encoder(tiny_model: Path) -> None:
    """A model of pairs, which has a card and a cycle as well."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tiny_model.parent / "transformer"), num_labels=1, device="cpu")
    model.predict([("a city", "paris"), ("a heap", "memory")])
    weights = storages(model)
    assert not release(model, collect="never").still_held
    assert all(weight.expired() for weight in weights)
    with pytest.raises(ReleasedError, match="'predict' cannot be used"):
        model.predict([("a", "b")])


def test_memory_mapped_tensor(tmp_path: Path) -> None:
    """The file stays as it is, and the mapping is closed."""
    path = tmp_path / "weights.bin"
    np.arange(100_000, dtype=np.float32).tofile(path)
    tensor = torch.from_file(str(path), shared=True, size=100_000)
    assert path.name in Path("/proc/self/maps").read_text()
    assert not release(tensor).errors
    assert tensor.numel() == 0
    assert path.name not in Path("/proc/self/maps").read_text()
    assert np.fromfile(path, dtype=np.float32)[-1] == 99_999


def test_module_over_a_mapped_file(tmp_path: Path) -> None:
    """Weights that torch.load mapped go with their mapping."""
    torch.save({"weight": torch.ones(64, 64)}, tmp_path / "model.pt")
    module = nn.Linear(64, 64, bias=False)
    state = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True)
    module.load_state_dict(state, assign=True)
    del state
    assert not release(module).still_held
    assert "model.pt" not in Path("/proc/self/maps").read_text()


def test_a_model_and_its_own_part() -> None:
    """Named twice, in either order: released once, without an error."""
    for order in (1, -1):
        model = nn.Sequential(nn.Linear(4, 4))
        report = release(*[model, model[0]][::order])
        assert report.errors == ()
        assert report.freed_bytes == {"host": 80}
