"""Which way is taken for which texts, what that costs, and what is not computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo import EmbeddingModel
from rag_demo.encoding import bert_encoder, linear_layers, two_byte_linear
from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.encoding.bert_settings import read_settings
from rag_demo.encoding.linear_layers import (
    OneDnnLinear,
    TorchLinear,
    WideLinear,
    fastest_first,
)
from rag_demo.encoding.worker_encoder import WorkerEncoder
from tiny_model import write_tiny_model

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.
LONG = "the cache of the city " * 40  # 64 tokens, which is what the model reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ways"), dimension=48)


def encoder(folder: Path, dtype: torch.dtype = torch.float32) -> BertEncoder:
    return BertEncoder(read_settings(folder), "cpu", dtype)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([LONG] * 15, False),
        ([LONG] * 16, True),  # 1,024 tokens
        (["a"] * 200, False),  # Three tokens each: many texts, but little to compute.
        ([LONG * 10_000], False),  # Of which 64 tokens are read.
        (["a"] * 257, True),  # More than one slice: what follows is not known yet.
    ],
)
def test_tokens_decide(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], expected: bool
) -> None:
    """Not how many texts there are; and a call is computed in one way."""
    taken: list[bool] = []
    real = BertEncoder.encode

    def encode(self: BertEncoder, tokens: Any, batch_size: int, *, many: bool = False) -> Any:
        taken.append(many)
        return real(self, tokens, batch_size, many=many)

    monkeypatch.setattr(BertEncoder, "encode", encode)
    with EmbeddingModel(folder, device="cpu") as model:
        model.embed_documents(texts)
    assert set(taken) == {expected}


def test_workers_guess() -> None:
    """They make the tokens later, so the parent counts characters, of each text as many as read."""
    guess = WorkerEncoder.count_tokens
    nothing: Any = None
    assert guess(nothing, ("document", ["four" * 256] * 4)) == 1024
    assert guess(nothing, ("document", ["x" * 10**7, "abcd"])) == 257


@pytest.mark.parametrize(("taken", "first"), [(0.95, TorchLinear), (0.8, OneDnnLinear)])
def test_another_way_must_be_worth_it(
    monkeypatch: pytest.MonkeyPatch, taken: float, first: type
) -> None:
    """A private operator that is hardly faster is not taken before torch's own."""

    used: list[type] = []

    class Watching(OneDnnLinear):
        def __call__(self, *args: Any, **options: Any) -> Any:
            used.append(type(self))
            return super().__call__(*args, **options)

    def measure(product: Callable[[], Any], **options: Any) -> Any:
        used.clear()
        product()
        return SimpleNamespace(device_s=[taken if used else 1.0])

    monkeypatch.setattr(linear_layers, "OneDnnLinear", Watching)
    monkeypatch.setattr(linear_layers, "measure", measure)
    weight, rows = torch.randn(40, 96), torch.randn(17, 96)
    chosen = fastest_first(weight, torch.zeros(40), rows, many=False)[0]
    assert chosen is (TorchLinear if first is TorchLinear else Watching)


def test_each_shape_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong for one layer only is not used; the control: nor would it be noticed before."""

    class Wrong(OneDnnLinear):
        def __call__(self, hidden: Any, **options: Any) -> Any:
            wrong = 1.01 if hidden.shape[1] == 40 else 1.0
            return super().__call__(hidden, **options) * wrong

    monkeypatch.setattr(linear_layers, "OneDnnLinear", Wrong)
    up, down = (torch.randn(40, 96), torch.zeros(40)), (torch.randn(96, 40), torch.zeros(96))
    rows = torch.randn(17, 96)
    assert Wrong in fastest_first(*up, rows, many=False)
    assert Wrong not in fastest_first(*up, rows, [down], many=False)


@pytest.mark.parametrize(("way", "many", "rows"), [
    (TorchLinear, True, {70}), (OneDnnLinear, True, {128}), (OneDnnLinear, False, {80}),
])  # fmt: skip
def test_rows_are_filled_up_only_where_code_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: Any, many: bool, rows: set[int]
) -> None:
    """For each count of rows, as oneDNN does and MKL does not."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("torch without MKL")
    seen: set[int] = set()

    class Watching(way):  # type: ignore[misc]
        def __call__(self, hidden: Any, **options: Any) -> Any:
            seen.add(len(hidden))
            return super().__call__(hidden, **options)

    monkeypatch.setattr(bert_encoder, "fastest_first", lambda *sample, many: [Watching])
    monkeypatch.setattr(BertEncoder, "_agree", lambda self, *layers, **options: True)
    model = encoder(folder)
    model.encode([list(range(5, 69)), [2, 6, 7, 8, 9, 3]], 32, many=many)
    assert seen == rows


def test_half_precision_is_computed_in_float32_throughout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor does that faster; nearer to the weights' own vectors."""
    seen: set[torch.dtype] = set()

    class Watching(WideLinear):
        def __call__(self, hidden: Any, **options: Any) -> Any:
            seen.add(hidden.dtype)
            return super().__call__(hidden, **options)

    exact = encoder(folder, torch.bfloat16)
    for name, buffer in dict(exact.named_buffers()).items():
        exact.register_buffer(name, buffer.float())
    tokens = exact.prepare([LONG, "the cache", ""], "document")
    expected = exact.encode(tokens, 32)
    errors = {}
    for way in (Watching, TorchLinear):
        monkeypatch.setattr(bert_encoder, "fastest_first", lambda *sample, many, way=way: [way])
        made = encoder(folder, torch.bfloat16).encode(tokens, 32, many=True)
        errors[way] = float(np.abs(made - expected).max())
    assert seen == {torch.float32}
    assert errors[Watching] < 1e-5 < errors[TorchLinear]


def test_ways_are_compared_by_few_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the first batch is: what is compared is computed twice."""
    lengths: list[int] = []
    real = BertEncoder.forward

    def forward(self: BertEncoder, texts: Any, layers: Any, *, many: bool) -> Any:
        lengths.append(sum(map(len, texts)))
        return real(self, texts, layers, many=many)

    monkeypatch.setattr(bert_encoder, "fastest_first", lambda *sample, many: [OneDnnLinear])
    monkeypatch.setattr(BertEncoder, "forward", forward)
    model = encoder(folder)
    model.encode(model.prepare([LONG] * 30, "document"), 32, many=True)
    assert lengths == [128, 128, 30 * 64]


def test_two_bytes_are_the_number() -> None:
    """Low and high, each plus 128, of the number in 32,512ths of the greatest in its row."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 96, generator=chance) * torch.logspace(-20, 20, 50)[:, None]
    rows[0, :3] = torch.tensor([0.0, 1.0, -1.0])
    for spent in (False, True):
        made, greatest = two_byte_linear._two_bytes(rows.clone(), spent=spent)
        low, high = (made.view(50, 96, 2).double() - 128).unbind(2)
        assert torch.equal(greatest[:, 0], rows.abs().amax(1))
        error = (256 * high + low) / 32512 * greatest - rows
        # Half a unit, and what float32 has lost of the number times its factor.
        assert (error.abs() <= 0.51 / 32512 * greatest).all()
    assert not (high / 127 * greatest - rows).abs().le(0.51 / 32512 * greatest).all()


def test_weights_are_packed_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing and high for the high bytes of the rows; high and low for what is mixed."""
    packed: list[Any] = []
    monkeypatch.setattr(two_byte_linear, "_products_are_exact", lambda: True)
    monkeypatch.setattr(two_byte_linear, "_packed", lambda pairs: packed.append(pairs))
    try:
        two_byte_linear.TwoByteLinear(torch.tensor([[1.0, -0.5, 0.3]]), torch.zeros(1))
    except AttributeError as error:
        pytest.skip(f"this torch has no such product: {error}")
    numbers = [32512, -16256, 9754]  # 9753.6, rounded
    high = [(number + 128) >> 8 for number in numbers]
    low = [number - 256 * part for number, part in zip(numbers, high, strict=True)]
    pairs = [part.view(torch.int8).view(3, 2).tolist() for part in packed]
    assert pairs[0] == [[0, part] for part in high]
    assert pairs[1] == [[h, part] for h, part in zip(high, low, strict=True)]


def test_an_interrupted_preparation_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, no way half chosen; the next call prepares anew, and gets the same vectors."""
    expected = encoder(folder).encode([[2, 5, 6, 3]], 32, many=True)
    monkeypatch.setattr(bert_encoder, "fastest_first", lambda *sample, many: [OneDnnLinear])
    model = encoder(folder)
    threads = threading.active_count()
    for name in ("_made_of", "_agree", "forward"):
        with monkeypatch.context() as patch:
            patch.setattr(BertEncoder, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.encode([[2, 5, 6, 3]], 32, many=True)
        assert not model._chosen
        assert threading.active_count() == threads
    assert np.abs(model.encode([[2, 5, 6, 3]], 32, many=True) - expected).max() < 1e-6
    assert type(model._chosen[True]["0_up"]) is OneDnnLinear


def interrupted(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt
