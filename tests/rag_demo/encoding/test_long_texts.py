"""Texts that are far longer than a model reads: the same tokens, and little memory for them."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
import torch

from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.encoding.bert_settings import read_settings

PARTS = ("漢", "字 ", "!", "?? ", "the ", "x" * 150, "capital", "_", "a-b ", "\u0301", "😀", "\n")


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> BertEncoder:
    return BertEncoder(read_settings(tiny_model), "cpu", torch.float32)


def tokens(encoder: BertEncoder, text: str) -> list[int]:
    return encoder.prepare([text], "document")[0]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_the_same(
    encoder: BertEncoder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever the text is of; control: one character less than is looked at, and they differ."""
    chance = random.Random(seed)
    some = chance.sample(PARTS, 4)
    text = "".join(chance.choice(some) for _ in range(6000))
    monkeypatch.setattr("rag_demo.encoding.bert_encoder._LONG_CHARS", 10**9)
    expected = tokens(encoder, text)
    monkeypatch.setattr("rag_demo.encoding.bert_encoder._LONG_CHARS", 0)
    assert tokens(encoder, text) == expected
    monkeypatch.setattr("rag_demo.encoding.bert_encoder._CHARS_PER_TOKEN", 0)
    assert tokens(encoder, text) != expected


@pytest.mark.parametrize("part", ["漢字", "!.?,;", "x", "😀", "a\u0301", "word "])
def test_the_tokenizer_sees_little(
    encoder: BertEncoder, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Of a million characters without a space too; its memory is a hundred times as much."""
    given: list[str] = []
    real = encoder.tokenizer

    class Watching:
        def encode_batch(self, texts: list[str]) -> object:
            given.extend(texts)
            return real.encode_batch(texts)

    monkeypatch.setattr(encoder, "tokenizer", Watching())
    text = part * (1_000_000 // len(part))
    tracemalloc.start()
    tokens(encoder, text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(given[0]) <= 256 * encoder.settings.max_tokens < len(text) / 10
    assert peak < 20 * len(text)
