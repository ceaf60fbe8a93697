"""Texts longer than a model of sentence-transformers reads: its vectors, little tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo.encoding import sentence_transformers_encoder
from rag_demo.encoding.sentence_transformers_encoder import SentenceTransformersEncoder

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.
LONG = [
    "the cache of the city " * 20_000,
    "   \n" * 5_000 + "paris is the capital . " * 3_000,
    "x" * 30_000 + " the heap " * 500,  # One unknown word, then what is read.
    "漢字" * 15_000,  # No space at all.
    "a" + " " * 60_000 + "the city",
    "the\x1ccache\u00a0of " * 4_000,
]


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> SentenceTransformersEncoder:
    return SentenceTransformersEncoder(str(tiny_model), "cpu", torch.float32, False)


def encode(encoder: SentenceTransformersEncoder, texts: list[str]) -> Any:
    return encoder.encode(encoder.prepare(texts, "document"), 32)


def test_the_same_vectors(
    encoder: SentenceTransformersEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; the control: what is cut where too little is read gets others."""
    cut = encode(encoder, LONG)
    monkeypatch.setattr(sentence_transformers_encoder, "_LONG_CHARS", 10**9)
    assert np.array_equal(cut, encode(encoder, LONG))
    monkeypatch.setattr(sentence_transformers_encoder, "_LONG_CHARS", 30)
    monkeypatch.setattr(sentence_transformers_encoder, "_MORE_TOKENS", -60)
    assert not np.array_equal(cut, encode(encoder, LONG))


def test_little_is_tokenised(encoder: SentenceTransformersEncoder) -> None:
    """Whatever follows; all of a text that has no space to cut at, or of which all is read."""
    text = "the cache of the city " * 100_000
    assert len(encoder._cut(text)) <= 20_000
    assert encoder._cut(LONG[3]) == LONG[3]
    assert encoder._cut(LONG[4]) == LONG[4]


@pytest.mark.parametrize(
    ("name", "value"), [("truncation_side", "left"), ("is_fast", False), ("max_seq_length", None)]
)
def test_not_where_the_end_may_be_read(
    encoder: SentenceTransformersEncoder, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """Tokenizers that cut at the beginning, that are not known, and models without a limit."""
    text = "the cache of the city " * 20_000
    assert encoder._cut(text) != text
    if name == "max_seq_length":
        monkeypatch.setattr(type(encoder.model), name, value)
    elif name == "is_fast":
        monkeypatch.setattr(type(encoder.model[0].tokenizer), name, value)
    else:
        monkeypatch.setattr(encoder.model[0].tokenizer, name, value)
    assert encoder._cut(text) == text
