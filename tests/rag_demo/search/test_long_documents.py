"""Long documents: embedded by passage, found by the best one, and still one document."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo import FaissRetriever
from tests.support.retriever_kinds import OnCpu

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima".split()
KINDS = [OnCpu, pytest.param(FaissRetriever, marks=pytest.mark.slow)]


class WordCounts:
    """Counts words, and reads the first thirty of a text only, as a model with a limit does."""

    name = "word counts"
    dimension = len(WORDS)
    max_tokens = 30  # It cannot count them.

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: Any) -> Any:
        self.embedded += texts
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Any:
        words = re.findall(r"\w+", text)[:30]
        return np.asarray([words.count(word) + 0.01 for word in WORDS])


def sentence(word: str, chance: random.Random) -> str:
    return " ".join([*[word] * 6, *chance.choices(WORDS, k=4)]) + "."


def collection(seed: int) -> dict[str, str]:
    """Return four short texts and eight longer ones, by id."""
    chance = random.Random(seed)
    texts = {}
    for n in range(12):
        topics = chance.choices(WORDS, k=chance.randint(2, 30))
        paragraphs = [" ".join(sentence(word, chance) for _ in range(8)) for word in topics]
        texts[f"{n:02}"] = "\n\n".join(paragraphs) if n % 3 else sentence(WORDS[n], chance)
    return texts


def embedded_of(text: str, passages: bool = True, **metadata: Any) -> list[str]:
    """Return what is embedded for one document: the whole, and its passages."""
    model = WordCounts()
    with OnCpu(model) as retriever:
        retriever.add([text], [metadata], passages=passages)
    return model.embedded


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 14), word=st.sampled_from(WORDS))
@settings(max_examples=4, deadline=None)
def test_document_scores_as_its_best_passage(kind: Any, seed: int, top_k: int, word: str) -> None:
    model, texts = WordCounts(), collection(seed)
    with kind(model) as retriever:
        retriever.add([*texts.values()], ids=[*texts], passages=True)
        results = retriever.search(word, top_k=top_k, mode="dense")
    query, scores = model.embed_query(word), []
    for text in texts.values():
        vectors = model.embed_documents(embedded_of(text)).astype(np.float32).astype(np.float64)
        scores.append((vectors @ query / np.linalg.norm(vectors, axis=1)).max())
    expected = np.sort(scores)[::-1][:top_k] / np.linalg.norm(query)
    assert [result.score for result in results] == pytest.approx(expected, abs=1e-6)
    assert len({result.id for result in results}) == min(top_k, len(texts))
    for result in results:
        own = scores[[*texts].index(result.id)] / np.linalg.norm(query)
        assert result.score == pytest.approx(own, abs=1e-6)
        if result.passage is not None:
            start, stop = result.passage
            assert 0 <= start < stop <= len(result.text)
            assert len(result.text) > 900


@pytest.mark.parametrize("kind", KINDS)
def test_passages_follow_changes_filters_and_saves(kind: Any, tmp_path: Path) -> None:
    texts = collection(3)

    def scores(**options: Any) -> dict[str, tuple[float, Any]]:
        found = retriever.search("delta", top_k=12, mode="dense", **options)
        return {each.id: (each.score, each.passage) for each in found}

    with kind(WordCounts()) as retriever:
        retriever.add([*texts.values()], [{"id": each} for each in texts], [*texts], passages=True)
        before = scores()
        retriever.save(tmp_path / "i")
        fused = retriever.search("delta", top_k=12, mode="hybrid")
        assert {result.id for result in fused} == set(texts)
        assert any(result.passage for result in fused)
        words = retriever.search("delta", top_k=12, mode="bm25")
        cut = [r.text[slice(*r.passage)] for r in words if r.passage]
        assert cut and all("delta" in passage for passage in cut)
    with kind(WordCounts()) as retriever:
        assert retriever.load(tmp_path / "i") == len(texts)
        assert scores() == before
        few = ["01", "02", "04"]
        assert scores(where={"id": few}) == {name: before[name] for name in few}
        assert retriever.delete(["02"]) == 1
        retriever.add(["echo"], ids=["04"], passages=True)
        left = scores()
        assert left.pop("04") != before["04"]
        assert left == {name: before[name] for name in before if name not in ("02", "04")}


def test_long_text_is_embedded_whole_and_by_passage() -> None:
    """A short text has no passages; the title is put before them."""
    text = "Title\n" + collection(5)["01"] * 3
    whole, *passages = embedded_of(text)
    assert whole == text
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert len(passages) > 2
    assert all(len(passage) < 900 for passage in passages)
    for short in ("x" * 900, "# A\n\nshort one"):
        assert embedded_of(short) == [short]
    _, *titled = embedded_of(text, title="A title")
    assert len(titled) == len(passages)
    assert all(each.startswith("A title") for each in titled)
    assert embedded_of(text, title=7) == [whole, *passages]
    assert embedded_of(text, passages=False) == [text]
