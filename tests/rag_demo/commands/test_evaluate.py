"""`rag-demo evaluate`: metrics beside their definitions, and BEIR's layout."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.rag_command import fail, succeed, write_lines


def judge(
    folder: Path, queries: list[dict[str, Any]], judgements: list[tuple[str, str, int]]
) -> Path:
    """Write queries and judgements as BEIR does."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "queries.jsonl", queries)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, each)) for each in judgements)]
    (folder / "qrels" / "test.tsv").write_text("".join(f"{line}\n" for line in lines))
    return folder


def make_index(path: Path, model: Path, *texts: tuple[str, str]) -> Path:
    lines = write_lines(path.with_suffix(".jsonl"), [{"_id": a, "text": b} for a, b in texts])
    succeed("index", lines, "--out", path, "--model", model)
    return path


def metrics(*command: str | Path) -> dict[str, float]:
    """Return what the command prints of each metric."""
    found = re.findall(r"^(\S+@\d+) +(\d\.\d+)$", succeed("evaluate", *command), re.MULTILINE)
    return {name: float(score) for name, score in found}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    queries = [{"_id": "q1", "text": "capital of france"}, {"_id": "q9", "text": "never judged"}]
    return judge(tmp_path / "small", queries, [("q1", "d1", 1)])


def test_several_indexes_are_judged_as_one(small: Path, tmp_path: Path, tiny_model: Path) -> None:
    one = make_index(tmp_path / "one", tiny_model, ("d1", "the capital of france"))
    two = make_index(tmp_path / "two", tiny_model, ("d2", "the heap gives memory back"))
    assert metrics(small, "--index", one, "--index", two)["nDCG@10"] == 1
    assert metrics(small, "--index", two, "--mode", "bm25")["nDCG@10"] == 0
    assert "small, hybrid, 1 questions" in succeed("evaluate", small, "--index", one)


def test_document_with_the_id_of_the_query_is_dropped(tmp_path: Path, tiny_model: Path) -> None:
    """Grades count, and a document at the second place gives less than the best."""
    texts = [(name, "capital of france") for name in ("q1", "a", "b")]
    index = make_index(tmp_path / "index", tiny_model, *texts)
    queries = [{"_id": "q1", "text": "capital"}]
    judge(tmp_path / "small", queries, [("q1", "b", 2), ("q1", "q1", 1)])
    found = metrics(tmp_path / "small", "--index", index, "--mode", "bm25")
    ideal = 2 + 1 / math.log2(3)
    assert found["nDCG@10"] == pytest.approx(2 / math.log2(3) / ideal, abs=1e-4)
    assert (found["MRR@10"], found["Recall@100"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("qrels/test.tsv", None, "cannot be read"),
        ("qrels/test.tsv", "a\tb\n1\t2\n", "wrong judgements"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq7\td1\t1\n", "unknown queries"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "contains no judgements"),
    ],
)
def test_invalid_collection_is_one_error_that_names_the_file(
    small: Path, file: str, content: str | None, said: str
) -> None:
    (small / file).unlink()
    if content is not None:
        (small / file).write_text(content)
    message = fail("evaluate", small, "--index", small)
    assert said in message and file in message
