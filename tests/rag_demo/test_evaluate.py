"""`rag-demo evaluate`: metrics beside a reference implementation, and BEIR's layout."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.rag_command import fail, succeed, write_lines


def write_beir(
    folder: Path,
    corpus: list[dict[str, Any]],
    queries: list[dict[str, Any]],
    judgements: list[tuple[str, str, int]],
    split: str = "test",
) -> Path:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, each)) for each in judgements)]
    (folder / "qrels" / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    corpus = [
        {"_id": "d1", "title": "Paris", "text": "the capital of france"},
        {"_id": "d2", "title": "", "text": "the heap gives memory back"},
        {"_id": "d3", "title": "Cache", "text": "a cache of memory"},
    ]
    queries = [{"_id": "q1", "text": "capital of france"}, {"_id": "q9", "text": "never judged"}]
    return write_beir(tmp_path / "small", corpus, queries, [("q1", "d1", 1)])


def evaluate(folder: Path, *options: str | Path) -> dict[str, list[float]]:
    """Return what is printed of each metric."""
    lines = succeed("evaluate", folder, *options).splitlines()
    return {
        name: [float(number) for number in re.findall(r"\d\.\d+", line.partition(name)[2])]
        for line in lines
        for name in ("nDCG@10", "Recall@100", "MRR@10")
        if name in line
    }


def test_indexes_are_judged_instead_of_the_collection(
    small: Path, tiny_model: Path, tmp_path: Path
) -> None:
    places: list[str | Path] = []
    for name in ("d1", "d2"):
        lines = [each for each in (small / "corpus.jsonl").read_text().splitlines() if name in each]
        (tmp_path / f"{name}.jsonl").write_text(lines[0])
        succeed(
            "index", tmp_path / f"{name}.jsonl", "--out", tmp_path / name, "--model", tiny_model
        )
        places += ["--index", tmp_path / name]
    assert evaluate(small, *places)["nDCG@10"][0] == 1
    assert evaluate(small, *places[2:], "--mode", "bm25")["nDCG@10"][0] == 0


def test_document_with_the_id_of_the_query_is_dropped(small: Path) -> None:
    """Grades count, and a document at the second place gives less than the best."""
    corpus = [{"_id": name, "title": "", "text": "capital of france"} for name in ("q1", "a", "b")]
    queries = [{"_id": "q1", "text": "capital"}]
    write_beir(small, corpus, queries, [("q1", "b", 2), ("q1", "q1", 1)])
    found = evaluate(small, "--mode", "bm25")
    ideal = 2 + 1 / math.log2(3)
    assert found["nDCG@10"] == [pytest.approx(2 / math.log2(3) / ideal, abs=1e-4)]
    assert found["MRR@10"] == [0.5]
    assert found["Recall@100"] == [0.5]


def test_table_names_the_collection(small: Path, tiny_model: Path) -> None:
    """And how many questions are judged."""
    shown = succeed("evaluate", small, "--model", tiny_model, "--device", "cpu")
    assert "small, hybrid, 1 questions" in shown
    assert evaluate(small, "--mode", "bm25")["nDCG@10"] == [1.0]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("corpus.jsonl", None, "cannot be read"),
        ("corpus.jsonl", '{"_id": 1, "text": "a"}\n' * 2, "the id '1' appears twice"),
        ("corpus.jsonl", "", "contains no documents"),
        ("queries.jsonl", "{", "not JSON"),
        ("qrels/test.tsv", "a\tb\n1\t2\n", "wrong judgements"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq7\td1\t1\n", "unknown queries"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "contains no judgements"),
    ],
)
def test_invalid_collection_is_one_error_that_names_the_file(
    small: Path, file: str, content: str | None, said: str
) -> None:
    if content is None:
        (small / file).unlink()
    else:
        (small / file).write_text(content)
    assert said in fail("evaluate", small)
