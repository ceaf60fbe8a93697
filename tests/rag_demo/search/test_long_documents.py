"""Long documents: embedded by passage, found by the best one, and still one document."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo import FaissRetriever, PyTorchGPURetriever

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima".split()
KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]


class WordCounts:
    """Counts words, and reads the first thirty of a text only, as a model with a limit does."""

    name = "word counts"
    dimension = len(WORDS)
    max_tokens = 30  # It cannot count them.

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: Any, on_progress: Any = None) -> Any:
        self.embedded += texts
        if on_progress is not None:
            for _ in texts:
                on_progress(1)
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Any:
        words = re.findall(r"\w+", text)[:30]
        return np.asarray([words.count(word) + 0.01 for word in WORDS])


def sentence(word: str, chance: random.Random) -> str:
    return " ".join([*[word] * 6, *chance.choices(WORDS, k=4)]) + "."


def long_text(chance: random.Random, sentences: int) -> str:
    return "\n\n".join(
        " ".join(sentence(word, chance) for _ in range(8))
        for word in chance.choices(WORDS, k=sentences)
    )


def collection(seed: int, count: int = 12) -> list[str]:
    chance = random.Random(seed)
    return [
        long_text(chance, chance.randint(2, 30)) if n % 3 else sentence(WORDS[n % 12], chance)
        for n in range(count)
    ]


def embedded_of(text: str) -> list[str]:
    """Return what is embedded for one document: the whole, and its passages."""
    model = WordCounts()
    with PyTorchGPURetriever(model, device="cpu") as retriever:
        retriever.add([text], passages=True)
    return model.embedded


def brute_force(texts: list[str], query: str) -> list[tuple[str, float]]:
    """Score each document by the best of what is embedded for it."""
    model = WordCounts()
    asked = model.embed_query(query)
    scores = {}
    for number, text in enumerate(texts):
        vectors = model.embed_documents(embedded_of(text)).astype(np.float32).astype(np.float64)
        cosines = vectors @ asked / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked)
        scores[f"{number:02}"] = float(cosines.max())
    return sorted(scores.items(), key=lambda item: (-round(item[1], 6), item[0]))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 14), word=st.sampled_from(WORDS))
@settings(max_examples=6, deadline=None)
def test_document_scores_as_its_best_passage(kind: Any, seed: int, top_k: int, word: str) -> None:
    texts = collection(seed)
    with kind(WordCounts()) as retriever:
        retriever.add(texts, ids=[f"{n:02}" for n in range(len(texts))], passages=True)
        results = retriever.search(word, top_k=top_k, mode="dense")
    expected = brute_force(texts, word)[:top_k]
    assert [r.score for r in results] == pytest.approx([s for _, s in expected], abs=1e-6)
    assert len({result.id for result in results}) == min(top_k, len(texts))
    for result in results:
        if result.passage is not None:
            start, stop = result.passage
            assert 0 <= start < stop <= len(result.text)
            assert len(result.text) > 900


@pytest.mark.parametrize("kind", KINDS)
def test_passages_follow_changes_filters_and_saves(kind: Any, tmp_path: Path) -> None:
    texts = collection(3)
    names = [f"{n:02}" for n in range(len(texts))]
    with kind(WordCounts()) as retriever:
        retriever.add(texts, [{"n": n} for n in range(len(texts))], names, passages=True)
        before = retriever.search("delta", top_k=12, mode="dense")
        retriever.save(tmp_path / "i")
        with kind(WordCounts()) as other:
            assert other.load(tmp_path / "i") == len(texts)
            assert other.search("delta", top_k=12, mode="dense") == before
            few = other.search("delta", top_k=12, mode="dense", where={"n": [1, 2, 4]})
            assert sorted(result.id for result in few) == ["01", "02", "04"]
            assert [each[1:] for each in few] == [
                each[1:] for each in before if each.id in {"01", "02", "04"}
            ]
            assert other.delete(["02"]) == 1
            other.add(["echo"], ids=["04"], passages=True)
            left = other.search("delta", top_k=12, mode="dense")
            assert sorted(result.id for result in left) == [n for n in names if n != "02"]
            expected = {r.id: r.score for r in before if r.id not in {"02", "04"}}
            assert {r.id: r.score for r in left if r.id != "04"} == pytest.approx(expected)
        fused = retriever.search("delta", top_k=12, mode="hybrid")
        assert len({result.id for result in fused}) == 12
        assert any(result.passage for result in fused)
        words = retriever.search("delta", top_k=12, mode="bm25")
        cut = [r.text[slice(*r.passage)] for r in words if r.passage]
        assert cut and all("delta" in passage for passage in cut)


def test_passages_cover_the_text() -> None:
    """A short text has none; the title is put before them."""
    text = "Title\n" + collection(5)[1] * 3
    whole, *passages = embedded_of(text)
    assert whole == text
    for word in set(text.split()):
        assert any(word in passage for passage in passages)
    assert sum(map(len, passages)) >= len("".join(text.split()))
    assert len(passages) > 2
    assert all(len(passage) < 900 for passage in passages)
    assert embedded_of("x" * 900) == ["x" * 900]
    assert embedded_of("# A\n\nshort one") == ["# A\n\nshort one"]
    model = WordCounts()
    with PyTorchGPURetriever(model, device="cpu") as retriever:
        retriever.add([text, text], [{"title": "A title"}, {"title": 7}], passages=True)
    count = len(passages) + 1
    titled, untitled = model.embedded[:-count], model.embedded[-count:]
    assert all(each.startswith("A title") for each in titled[1:])
    assert untitled == [whole, *passages]
    model = WordCounts()
    with PyTorchGPURetriever(model, device="cpu") as retriever:
        retriever.add([text], passages=False)
        assert model.embedded == [text]
        assert retriever.search("delta")[0].id == "0"
