"""`rag-demo evaluate`: metrics beside a reference implementation, and BEIR's layout."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import ir_measures
import pytest
from ir_measures import RR, R, nDCG

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from support.rag_command import fail, succeed, write_lines

WORDS = "paris france capital heap trim cache city memory back give".split()


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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "bm25", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_the_reference_implementation(
    tiny_model: Path, tmp_path: Path, mode: str, seed: int
) -> None:
    """The query's own document is dropped."""
    chance = random.Random(seed)

    def some(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    corpus = [{"_id": f"d{n}", "title": some(1), "text": some(5)} for n in range(150)]
    queries = [{"_id": f"{'d' if n < 5 else 'q'}{n}", "text": some(3)} for n in range(12)]
    judgements = [
        (query["_id"], f"d{n}", chance.randrange(3))
        for query in queries
        for n in chance.sample(range(12, 150), 8)
    ]
    folder = write_beir(tmp_path / "c", corpus, queries, judgements)
    with (
        EmbeddingModel(tiny_model, device="cpu") as model,
        PyTorchGPURetriever(model, device="cpu") as retriever,
    ):
        texts = [f"{each['title']} {each['text']}" for each in corpus]
        retriever.add(texts, ids=[each["_id"] for each in corpus])
        run = []
        for query in queries:
            found = [each.id for each in retriever.search(query["text"], top_k=101, mode=mode)]
            found = [name for name in found if name != query["_id"]][:100]
            run += [ir_measures.ScoredDoc(query["_id"], n, -rank) for rank, n in enumerate(found)]
    qrels = [ir_measures.Qrel(*each) for each in judgements]
    measures = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    expected = ir_measures.calc_aggregate(list(measures.values()), qrels, run)
    printed = evaluate(folder, "--mode", mode, "--model", tiny_model, "--device", "cpu")
    assert set(printed) == set(measures)
    for name, measure in measures.items():
        assert printed[name] == pytest.approx([expected[measure]], abs=1e-3), name


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
