"""Reranking by a real cross-encoder: the architecture of BERT with random weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import TEXTS, ask, search
from tests.support.tiny_model import write_tiny_reranker

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.
QUERY = "how do i give memory back"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cross-encoder with one output."""
    pytest.importorskip("transformers", reason="needs the extra rag")
    return write_tiny_reranker(tmp_path_factory.mktemp("reranker"), QUERY, TEXTS)


@pytest.fixture(scope="module")
def logits(reranker: Path) -> list[float]:
    """Return the logits of TEXTS, computed by transformers alone."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reranker).eval()
    with torch.no_grad():
        pairs = tokenizer([QUERY] * len(TEXTS), TEXTS, padding=True, return_tensors="pt")
        found: list[float] = model(**pairs).logits[:, 0].tolist()
    assert max(found) - min(found) > 0.01
    return found


def test_scores_are_sigmoids_of_the_logits(index: Path, reranker: Path, logits: Any) -> None:
    """In the shapes of text-embeddings-inference, Jina and Cohere, with their fields."""
    tei = {"query": QUERY, "texts": TEXTS}
    jina = {"query": QUERY, "documents": TEXTS, "model": "tiny-reranker"}
    cohere = {"query": QUERY, "documents": TEXTS, "model": "default", "top_n": 2}
    by_tei, raw, by_jina, same, by_cohere, models, wrong = ask(
        index,
        ("POST", "/rerank", {"json": tei | {"return_text": True}}),
        ("POST", "/rerank", {"json": tei | {"raw_scores": True}}),
        ("POST", "/v1/rerank", {"json": jina}),
        ("POST", "/rerank", {"json": jina}),
        ("POST", "/v2/rerank", {"json": cohere}),
        ("GET", "/v1/models", {}),
        ("POST", "/rerank", {"json": {"query": QUERY, "texts": []}}),
        reranker=str(reranker),
    )
    order = sorted(range(len(TEXTS)), key=lambda row: -logits[row])
    scores = [1 / (1 + math.exp(-logits[row])) for row in order]
    assert [each["index"] for each in by_tei.json()] == order
    assert [each["score"] for each in by_tei.json()] == pytest.approx(scores, abs=1e-4)
    assert [each["text"] for each in by_tei.json()] == [TEXTS[row] for row in order]
    found = {each["index"]: each["score"] for each in raw.json()}
    assert [found[row] for row in range(len(TEXTS))] == pytest.approx(logits, abs=1e-3)
    results = by_jina.json()["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(scores, abs=1e-4)
    assert [each["document"]["text"] for each in results] == [TEXTS[row] for row in order]
    assert by_jina.json()["usage"]["total_tokens"] > len(TEXTS) * 8
    assert same.json()["results"] == results
    assert [set(each) for each in by_cohere.json()["results"]] == [{"index", "relevance_score"}] * 2
    assert by_cohere.json()["meta"]["billed_units"] == {"search_units": 1}
    assert [each["id"] for each in models.json()["data"]] == ["hashed", "tiny-reranker"]
    assert wrong.status_code == 400 and wrong.json()["error_type"] == "Empty"


def test_search_reranks_in_the_same_call(index: Path, reranker: Path, logits: Any) -> None:
    too_long = {"query": QUERY, "texts": ["word " * 200], "truncate": False}
    searched, long, refused = ask(
        index,
        search({"query": QUERY, "top_k": 2, "rerank": True}),
        ("POST", "/rerank", {"json": {"query": QUERY, "texts": ["word " * 200, "word"]}}),
        ("POST", "/rerank", {"json": too_long}),
        reranker=str(reranker),
    )
    best = sorted(range(len(TEXTS)), key=lambda row: -logits[row])[:2]
    results = searched.json()["results"]
    assert [each["id"] for each in results] == [str(row) for row in best]
    assert [each["rank"] for each in results] == [1, 2]
    assert results[0]["score"] == pytest.approx(1 / (1 + math.exp(-logits[best[0]])), abs=1e-4)
    assert long.headers["x-truncated-texts"] == "1"
    assert refused.status_code == 413
