"""Linear layers in other ways than torch's own: right where they are used, unused where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo.encoding import bert_encoder
from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.encoding.bert_settings import read_settings
from rag_demo.encoding.linear_layers import OneDnnLinear, TorchLinear, WideLinear, fastest_first
from rag_demo.encoding.two_byte_linear import TwoByteLinear
from tiny_model import write_tiny_model

TF32 = 2.0**-11
TEXTS = ["the cache", "how do i give memory back " * 9, "a", "the city , the heap ? 42", ""]


def layer(rows: int = 40, width: int = 96, seed: int = 0) -> tuple[Any, Any, Any]:
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=chance) / width**0.5
    return weight, torch.randn(rows, generator=chance), torch.randn(17, width, generator=chance)


def two_bytes(weight: Any, bias: Any) -> TwoByteLinear:
    try:
        return TwoByteLinear(weight, bias)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this processor or torch has no such product: {error}")


def error_of(result: Any, weight: Any, bias: Any, hidden: Any) -> float:
    expected = hidden.double() @ weight.double().T + bias.double()
    return float((result.double() - expected).norm() / expected.norm())


@given(
    seed=st.integers(0, 1000),
    width=st.integers(2, 200),
    outlier=st.sampled_from([1.0, 10.0, 40.0]),
    size=st.sampled_from([1e-12, 1.0, 1e12]),
)
@settings(max_examples=60, deadline=None)
def test_two_bytes_are_nearly_float32(seed: int, width: int, outlier: float, size: float) -> None:
    """No worse than TF32 is, for rows of any magnitude and with outliers as models have them."""
    weight, bias, hidden = layer(width=width, seed=seed)
    hidden[:, 0] *= outlier
    hidden, bias = hidden * size, bias * size
    error = error_of(two_bytes(weight, bias)(hidden), weight, bias, hidden)
    assert error < TF32


def test_control_bfloat16_is_not_so_near() -> None:
    """The same bound fails for products of one byte less."""
    weight, bias, hidden = layer()
    result = TorchLinear(weight.bfloat16(), bias.bfloat16())(hidden.bfloat16())
    assert error_of(result, weight, bias, hidden) > TF32


def test_rows_do_not_depend_on_each_other() -> None:
    """Bit for bit, whatever stands beside them; only a row with NaN or infinity is lost."""
    weight, bias, hidden = layer()
    linear = two_bytes(weight, bias)
    together = linear(hidden)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in hidden]))
    hidden[3, 5], hidden[4, 6], hidden[5] = torch.nan, torch.inf, 0.0
    damaged = linear(hidden)
    assert not damaged[3].isfinite().any()
    assert not damaged[4].isfinite().any()
    assert torch.equal(damaged[5], bias)
    others = [row for row in range(17) if row not in (3, 4, 5)]
    assert torch.equal(damaged[others], together[others])


def test_rows_are_overwritten_only_if_spent() -> None:
    """And the result is the same."""
    weight, bias, hidden = layer()
    linear = two_bytes(weight, bias)
    before = hidden.clone()
    result = linear(hidden, gelu=True)
    assert torch.equal(hidden, before)
    assert torch.equal(linear(hidden, gelu=True, spent=True), result)
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(before, weight, bias))
    assert (result - expected).norm() < TF32 * expected.norm()


def test_products_that_overflow_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of processors without VNNI are."""
    weight, bias, hidden = layer()
    monkeypatch.setattr("rag_demo.encoding.two_byte_linear._products_are_exact", lambda: False)
    with pytest.raises(RuntimeError, match="VNNI"):
        TwoByteLinear(weight, bias)
    assert TwoByteLinear not in list(fastest_first(weight, bias, hidden, many=True))


def test_wrong_or_missing_operators_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private operators are tried before they are trusted."""
    weight, bias, hidden = layer()
    assert OneDnnLinear in list(fastest_first(weight, bias, hidden, many=False))

    class Wrong:
        @staticmethod
        def _linear_pointwise(x: Any, w: Any, b: Any, *rest: Any) -> Any:
            return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b)) * 1.001

    class Other:
        @staticmethod
        def _linear_pointwise(x: Any, w: Any) -> Any:
            return x

    for namespace in (Wrong, Other, object()):
        monkeypatch.setattr(torch.ops, "mkldnn", namespace)
        assert OneDnnLinear not in list(fastest_first(weight, bias, hidden, many=False))
    monkeypatch.setattr(torch.ops, "onednn", object())
    assert list(fastest_first(weight, bias, hidden, many=True)) == [TorchLinear]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_products(dtype: Any) -> None:
    """For types that the processor does not multiply: nearer to the truth than their own."""
    weight, bias, hidden = (part.to(dtype) for part in layer())
    result = WideLinear(weight, bias)(hidden)
    assert result.dtype == dtype
    own = TorchLinear(weight, bias)(hidden)
    assert error_of(result, weight, bias, hidden) <= error_of(own, weight, bias, hidden) * 1.1
    assert WideLinear in list(fastest_first(weight, bias, hidden, many=False))


pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("layers"), dimension=48)


def encoder(folder: Path, way: Any, monkeypatch: pytest.MonkeyPatch) -> BertEncoder:
    monkeypatch.setattr(bert_encoder, "fastest_first", lambda *sample, many: [way])
    return BertEncoder(read_settings(folder), "cpu", torch.float32)


def encode(model: BertEncoder, texts: list[str] = TEXTS, batch_size: int = 32) -> Any:
    return model.encode(model.prepare(texts, "document"), batch_size, many=True)


@pytest.mark.parametrize("way", [TorchLinear, OneDnnLinear, TwoByteLinear])
def test_each_way_makes_the_same_vectors(
    folder: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's own way does; and whether texts come alone, in a batch, or in small ones."""
    if way is TwoByteLinear:
        two_bytes(*layer()[:2])
    model = encoder(folder, way, monkeypatch)
    together = encode(model)
    assert type(model._chosen[True]["0_up"]) is way
    plain = encode(encoder(folder, TorchLinear, monkeypatch))
    assert (together * plain).sum(axis=1).min() > 1 - 1e-5
    assert np.abs(encode(model, batch_size=1) - together).max() < 1e-6
    other = encoder(folder, way, monkeypatch)
    alone = [encode(other, [text]) for text in TEXTS]
    assert np.abs(np.concatenate(alone) - together).max() < 1e-6


def test_a_way_with_other_vectors_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its product is near enough on the sample."""

    class Turned(TorchLinear):
        def __call__(self, hidden: Any, **options: Any) -> Any:
            return super().__call__(hidden, **options).roll(1, dims=1)

    model = encoder(folder, Turned, monkeypatch)
    vectors = encode(model)
    assert type(model._chosen[True]["0_up"]) is TorchLinear
    monkeypatch.setattr(bert_encoder, "_LEAST_COSINE", -2.0)  # The control: it would be used.
    wrong = encode(encoder(folder, Turned, monkeypatch))
    assert (vectors * wrong).sum(axis=1).min() < 0.999
