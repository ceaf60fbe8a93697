"""Metrics beside a reference implementation, the collection's files, and search by words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, R, nDCG

from programs import assert_clean, run_forked
from rag_demo import FaissRetriever, PyTorchGPURetriever
from rag_demo.errors import SourceError
from rag_demo.evaluate import Collection, evaluate, metrics_of, read_beir
from rag_demo.searching.ranking import fuse

NAMES = [f"d{n}" for n in range(40)]


@given(
    ranking=st.permutations(NAMES).map(lambda names: names[:30]),
    grades=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), min_size=1),
)
@settings(max_examples=150, deadline=None)
def test_metrics_are_those_of_the_reference(ranking: list[str], grades: dict[str, int]) -> None:
    """nDCG@10, Recall@100 and MRR@10, with grades, against trec_eval's."""
    qrels = [ir_measures.Qrel("q", name, grade) for name, grade in grades.items()]
    run = [ir_measures.ScoredDoc("q", n, 100.0 - rank) for rank, n in enumerate(ranking)]
    measures = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    expected = ir_measures.calc_aggregate(list(measures.values()), qrels, run)
    for name, value in metrics_of(ranking, grades).items():
        assert value == pytest.approx(expected[measures[name]], abs=1e-6), name


def test_intervals() -> None:
    """The interval holds the mean, and is a point where all questions are alike."""
    collection = Collection(
        [], {str(n): "q" for n in range(50)}, {str(n): {"a": 1} for n in range(50)}
    )
    score = evaluate(collection, lambda questions: [["a"] for _ in questions])["nDCG@10"]
    assert (score.mean, score.low, score.high) == (1.0, 1.0, 1.0)
    score = evaluate(collection, lambda questions: [["a"], ["b"]] * 25)["MRR@10"]
    assert 0.3 < score.low < score.mean == 0.5 < score.high < 0.7


def write_beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    corpus = [
        {"_id": "d1", "title": "Paris", "text": "the capital of france"},
        {"_id": "d2", "title": "", "text": "the heap gives memory back"},
        {"_id": "d3", "title": "Cache", "text": "a cache of memory"},
    ]
    queries = [{"_id": "q1", "text": "capital of france"}, {"_id": "q9", "text": "never judged"}]
    for name, records in (("corpus", corpus), ("queries", queries)):
        lines = "\n".join(json.dumps(record) for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    return folder


def test_read_beir(tmp_path: Path) -> None:
    """Titles belong to the texts; what is not judged is not asked."""
    collection = read_beir(write_beir(tmp_path / "c"))
    assert collection.documents[0].text == "Paris the capital of france"
    assert collection.questions == {"q1": "capital of france"}
    assert collection.judgements == {"q1": {"d1": 1}}


def test_other_splits_and_blank_lines(tmp_path: Path) -> None:
    """Judgements of another split; a file that ends with an empty line is no error."""
    folder = write_beir(tmp_path / "c")
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq9\td2\t2\n")
    with (folder / "corpus.jsonl").open("a") as file:
        file.write("\n\n")
    assert len(read_beir(folder).documents) == 3
    assert read_beir(folder, "dev").judgements == {"q9": {"d2": 2}}


def test_questions_that_are_documents_do_not_answer_themselves() -> None:
    """As BEIR scores collections such as ArguAna; other documents move up by one rank."""
    collection = Collection([], {"a": "q", "b": "q"}, {"a": {"c": 1}, "b": {"a": 1}})
    scores = evaluate(collection, lambda questions: [["a", "c", "b"], ["a", "b", "c"]])
    assert scores["MRR@10"].mean == 1.0
    control = metrics_of(["a", "c", "b"], {"c": 1})
    assert control["MRR@10"] == 0.5


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("corpus.jsonl", None, "cannot be read"),
        ("corpus.jsonl", '{"text": "no id"}', 'expected an object with "_id"'),
        ("queries.jsonl", "{", "cannot be read as JSON lines"),
        ("qrels/test.tsv", "a\tb\n1\t2\n", "cannot be read as judgements"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\tx\n", "as judgements"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq7\td1\t1\n", "'q7', which is not there"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "judges nothing"),
    ],
)
def test_bad_collections(file: str, content: str | None, said: str, tmp_path: Path) -> None:
    """One error that names the file."""
    folder = write_beir(tmp_path / "c")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(SourceError, match=said):
        read_beir(folder)


class Letters:
    """Counts letters: near in letters is not near in words."""

    name = "letters"
    dimension = 26

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]

    def embed_documents(self, texts: Any) -> Any:
        return np.asarray([[t.lower().count(chr(97 + i)) + 0.1 for i in range(26)] for t in texts])


TEXTS = ["running in parks", "a park near the river", "strap on krap", "rivers run", "parking"]


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_modes(kind: Any) -> None:
    """By vectors, by stemmed words, by both; filters and changes count in all of them."""
    with kind(Letters()) as retriever:
        retriever.add(TEXTS, [{"odd": n % 2 == 1} for n in range(5)], ids=list("abcde"))
        dense = [result.id for result in retriever.search("parks", top_k=5)]
        words = [result.id for result in retriever.search("parks", top_k=5, mode="bm25")]
        fused = retriever.search("parks", top_k=5, mode="hybrid")
        assert dense[0] == "c" or dense[0] in "ae"
        assert sorted(words) == ["a", "b", "e"]  # "parks", "park", "parking": one stem
        rankings = [np.asarray(["abcde".index(n) for n in names]) for names in (dense, words)]
        expected = fuse(rankings, 5, by_number)
        assert [(result.id, result.score) for result in fused] == [
            ("abcde"[row], score) for row, score in zip(*expected, strict=True)
        ]
        odd = retriever.search("parks", top_k=5, mode="hybrid", where={"odd": True})
        assert {result.id for result in odd} == {"b", "d"}
        retriever.delete(["b"])
        retriever.add(["the park"], ids=["f"])
        again = retriever.search("parks", top_k=5, mode="bm25")
        assert sorted(result.id for result in again) == ["a", "e", "f"]
        assert retriever.search("zebra", mode="bm25") == []
        assert retriever.search("the of", mode="bm25") == []
        with pytest.raises(ValueError, match="mode must be one of dense, bm25, hybrid"):
            retriever.search("x", mode="sparse")


def by_number(numbers: Any, count: int) -> list[int]:
    return sorted(numbers.tolist())[:count]


def test_fusion() -> None:
    """1 / (60 + rank), summed; equal scores by name."""
    items, scores = fuse([np.asarray([0, 1]), np.asarray([1, 2])], 3, by_number)
    assert items.tolist() == [1, 0, 2]
    assert scores.tolist() == [1 / 61 + 1 / 62, 1 / 61, 1 / 62]
    assert fuse([np.asarray([1]), np.asarray([0])], 2, by_number)[0].tolist() == [0, 1]


def test_command(tiny_model: Path, tmp_path: Path) -> None:
    """A table with all three metrics and their intervals."""
    folder = write_beir(tmp_path / "c")
    program = "from rag_demo.cli import main; main()"
    options = ("--mode", "hybrid", "--model", str(tiny_model), "--device", "cpu")
    done = run_forked(program, "evaluate", str(folder), *options, quick_end=True)
    assert_clean(done)
    assert "nDCG@10" in done.stdout
    assert "1.0000" in done.stdout
    assert "c, hybrid, 1 questions" in done.stdout
