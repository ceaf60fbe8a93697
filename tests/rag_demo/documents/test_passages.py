"""Long documents: embedded by passage too, found by the best of them, and still one document."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo import FaissRetriever, PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.documents.passages import passages_of
from rag_demo.documents.rows import DocumentRows, texts_to_embed
from rag_demo.errors import IndexFileError
from rag_demo.index import read_index, write_index
from rag_demo.ingest import ingest

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima".split()
KINDS = [PyTorchGPURetriever, FaissRetriever]


class WordCounts:
    """Counts words, and reads the first thirty of a text only, as a model with a limit does."""

    name = "word counts"
    dimension = len(WORDS)

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


def brute_force(texts: list[str], query: str) -> list[tuple[str, float]]:
    """Score each document by the best of what is embedded for it."""
    model = WordCounts()
    asked = model.embed_query(query)
    scores = {}
    for number, text in enumerate(texts):
        inputs, _ = texts_to_embed([(text, {})])
        vectors = model.embed_documents(inputs).astype(np.float32).astype(np.float64)
        cosines = vectors @ asked / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked)
        scores[f"{number:02}"] = float(cosines.max())
    return sorted(scores.items(), key=lambda item: (-round(item[1], 6), item[0]))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 14), word=st.sampled_from(WORDS))
@settings(max_examples=10, deadline=None)
def test_documents_score_as_their_best_passage(kind: Any, seed: int, top_k: int, word: str) -> None:
    """As many documents as were asked for, each once, in the order that brute force finds."""
    texts = collection(seed)
    with kind(WordCounts()) as retriever:
        retriever.add(texts, ids=[f"{n:02}" for n in range(len(texts))], passages=True)
        results = retriever.search(word, top_k=top_k)
    expected = brute_force(texts, word)[:top_k]
    assert [r.score for r in results] == pytest.approx([s for _, s in expected], abs=1e-6)
    assert len({result.id for result in results}) == min(top_k, len(texts))
    for result in results:
        if result.passage is not None:
            start, stop = result.passage
            _, rows = texts_to_embed([(texts[int(result.id)], {})])
            assert 0 <= start < stop <= len(result.text)
            assert not rows.are_whole


def test_control_rows_alone_are_not_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes the best rows for documents answers with one document many times."""
    monkeypatch.setattr("rag_demo.searching.asked.best_of_each", lambda ranked, rows: ranked)
    text = " ".join(["alpha"] * 1000)
    with PyTorchGPURetriever(WordCounts(), device="cpu") as retriever:
        retriever.add(["alpha bravo", "bravo", text], passages=True)
        with pytest.raises((AssertionError, IndexError)):
            assert len({result.id for result in retriever.search("alpha", top_k=3)}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_a_long_document_is_found(kind: Any) -> None:
    """What a model does not read of a whole is found by its passage; without passages it is not."""
    text = "Title\n\n" + "alpha bravo. " * 100 + "\n\n" + "kilo lima. " * 60
    for passages in (True, False):
        with kind(WordCounts()) as retriever:
            retriever.add(
                [text, "golf hotel kilo"],
                [{"title": "Title"}, {}],
                ids=["long", "short"],
                passages=passages,
            )
            first, second = retriever.search("kilo lima", top_k=2)
            assert len(retriever) == 2
            assert (first.id == "long") is passages
            if passages:
                assert first.passage is not None
                assert text[slice(*first.passage)].startswith("kilo lima.")
                assert second.passage is None


@pytest.mark.parametrize("kind", KINDS)
def test_changes_filters_and_words(kind: Any, tmp_path: Path) -> None:
    """Passages go with their document, are filtered with it, and come back from the disk."""
    texts = collection(3)
    names = [f"{n:02}" for n in range(len(texts))]
    with kind(WordCounts()) as retriever:
        retriever.add(texts, [{"n": n} for n in range(len(texts))], names, passages=True)
        before = retriever.search("delta", top_k=12)
        retriever.save(tmp_path / "i")
        with kind(WordCounts()) as other:
            assert other.load(tmp_path / "i") == len(texts)
            assert other.search("delta", top_k=12) == before
            few = other.search("delta", top_k=12, where={"n": [1, 2, 4]})
            assert sorted(result.id for result in few) == ["01", "02", "04"]
            assert [r for r in before if r.id in {"01", "02", "04"}] == [
                result._replace(rank=rank)
                for result, rank in zip(
                    few, [r.rank for r in before if r.id in {"01", "02", "04"}], strict=True
                )
            ]
            assert other.delete(["02"]) == 1
            other.add(["echo"], ids=["04"], passages=True)
            left = other.search("delta", top_k=12)
            assert sorted(result.id for result in left) == [n for n in names if n != "02"]
            expected = {r.id: r.score for r in before if r.id not in {"02", "04"}}
            assert {r.id: r.score for r in left if r.id != "04"} == pytest.approx(expected)
        fused = retriever.search("delta", top_k=12, mode="hybrid")
        assert len({result.id for result in fused}) == 12
        assert any(result.passage for result in fused)
        words = retriever.search("delta", top_k=12, mode="bm25")
        assert all(result.passage is None for result in words)


def test_passages_cover_the_text() -> None:
    """Nothing of a long text is in no passage; a short one has none; titles stand before them."""
    text = "Title\n" + collection(5)[1] * 3
    found = passages_of(text, "Title")
    covered = "".join("".join(text[p.start : p.stop].split()) for p in found)
    assert covered == "".join(text.split())
    assert len(found) > 2
    assert all(passage.text.startswith("Title") for passage in found)
    assert all(len(passage.text) < 900 for passage in found)
    assert passages_of("x" * 1000) == []
    assert passages_of("# A\n\nshort one", "A") == []
    assert passages_of(text, 7) == passages_of(text)


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3), max_size=6))
def test_rows(spans: list[list[tuple[int, int]]]) -> None:
    """Rows of documents, in any order and number."""
    rows = DocumentRows.of(spans)
    assert len(rows) == sum(1 + len(its) for its in spans)
    known = [(n, span) for n, its in enumerate(spans) for span in (None, *its)]
    owners = rows.owners(np.arange(len(rows))).tolist()
    assert owners == [owner for owner, _ in known]
    assert [rows.span(row) for row in range(len(rows))] == [span for _, span in known]
    order = np.asarray(list(range(len(spans)))[::-2], np.int64)
    kept = rows.keep(order)
    expected = [span for n in order.tolist() for span in (None, *spans[n])]
    assert [kept.span(row) for row in range(len(kept))] == expected
    assert [known[row][0] for row in rows.rows_of(order).tolist()] == [
        n for n in order.tolist() for _ in (None, *spans[n])
    ]
    both = DocumentRows.join([rows, kept])
    assert len(both) == len(rows) + len(kept)
    assert both.documents == rows.documents + kept.documents


def test_rows_of_a_damaged_index(tmp_path: Path) -> None:
    """Counts that do not fit are an error that says what to do, not a wrong answer."""
    documents = [Document(name, name, {}) for name in "ab"]
    vectors = np.eye(3, 4, dtype=np.float32)
    good = DocumentRows(2, np.asarray([1, 2]), np.asarray([[0, 0], [0, 0], [0, 5]]))
    write_index(tmp_path / "good", "m", vectors, documents, good)
    assert read_index(tmp_path / "good").rows.span(2) == (0, 5)
    for counts in ([1, 1], [0, 3], [-1, 4], [1, 2**62], [3]):
        with pytest.raises(ValueError, match="document"):
            DocumentRows(2, np.asarray(counts), good.spans)
    bad = DocumentRows(2, np.asarray([1, 2]), good.spans)
    bad.counts = np.asarray([2, 2])
    write_index(tmp_path / "bad", "m", vectors, documents, bad)
    with pytest.raises(IndexFileError, match="rag-demo index SOURCE"):
        read_index(tmp_path / "bad")


def test_ingestion_keeps_passages(tmp_path: Path) -> None:
    """They are saved, and not embedded again while their document stays the same."""
    texts = collection(9, count=9)
    documents = [Document(str(n), text, {}) for n, text in enumerate(texts)]
    model, progress = WordCounts(), list[int]()
    ingest(documents, model, tmp_path / "i", on_progress=progress.append)
    assert model.embedded == texts_to_embed([(text, {}) for text in texts])[0]
    assert sum(progress) == len(texts)
    with PyTorchGPURetriever(WordCounts(), device="cpu") as retriever:
        retriever.load(tmp_path / "i")
        before = {r.id: r for r in retriever.search("golf", top_k=9)}
    changed = [
        *documents[:4],
        Document("4", "golf golf", {}),
        *documents[5:],
        Document("n", "x", {}),
    ]
    again = WordCounts()
    done = ingest(changed, again, tmp_path / "i")
    assert again.embedded == ["golf golf", "x"]
    assert (done.embedded, done.reused) == (2, 8)
    with PyTorchGPURetriever(WordCounts(), device="cpu") as retriever:
        retriever.load(tmp_path / "i")
        after = {r.id: r for r in retriever.search("golf", top_k=10)}
    assert [document.id for document in read_index(tmp_path / "i").documents] == [
        d.id for d in changed
    ]
    for name in set(before) - {"4"}:
        assert after[name]._replace(rank=0) == before[name]._replace(rank=0)
