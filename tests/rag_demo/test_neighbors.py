"""search(..., neighbors=N): the passages before and after a result, in one text."""

from pathlib import Path
from typing import Any

import pytest

from rag_demo import PyTorchGPURetriever
from rag_demo.neighbors import with_neighbors
from rag_demo.reading.sources import Reading, Skipped, read_source
from tests.support.small_collections import Hashed

TEXT = "\n\n".join(
    f"Paragraph {n} is about {name}, and has a few more words so that it fills a passage."
    for n, name in enumerate(("zebras", "lions", "owls", "whales", "bees", "ants"))
)


def search(folder: Path, query: str, count: int, **options: Any) -> tuple[str, str, str]:
    """Return the best text without neighbors, with them, and its passage there."""
    with PyTorchGPURetriever(Hashed()) as retriever:
        found = list(read_source(str(folder), Skipped(), Reading(**options)))
        ids = [f"{each.metadata['source']}#{each.metadata['start']}" for each in found]
        retriever.add([each.text for each in found], [each.metadata for each in found], ids)
        (alone,) = retriever.search(query, 1, mode="bm25")
        (wide,) = retriever.search(query, 1, mode="bm25", neighbors=count)
    assert (wide.id, wide.score, wide.rank) == (alone.id, alone.score, alone.rank)
    return alone.text, wide.text, wide.text[slice(*wide.passage or (None,))]


@pytest.mark.parametrize(
    ("query", "count", "overlap", "first", "last"),
    [
        ("owls", 1, 0, 1, 3),
        ("zebras", 1, 60, 0, 1),
        ("owls", 9, 0, 0, 5),
        ("owls", 0, 40, 2, 2),
    ],
)
def test_text_includes_what_stands_around(
    tmp_path: Path, query: str, count: int, overlap: int, first: int, last: int
) -> None:
    tmp_path.joinpath("a.txt").write_text(TEXT)
    tmp_path.joinpath("b.txt").write_text(TEXT.replace("owls", "cows"))
    alone, wide, passage = search(tmp_path, query, count, chunk_size=100, chunk_overlap=overlap)
    assert wide in TEXT and passage == alone
    assert f"Paragraph {first}" in wide and f"Paragraph {last}" in wide
    assert f"Paragraph {last + 1}" not in wide


def test_header_of_a_table_is_not_repeated(tmp_path: Path) -> None:
    rows = "".join(f"| option{n} | {n} seconds of waiting |\n" for n in range(60))
    table = f"| name | meaning |\n|---|---|\n{rows}"
    tmp_path.joinpath("a.md").write_text(f"Before it.\n\n{table}\n\nAfter the table.")
    alone, wide, passage = search(tmp_path, "option30", 1, chunk_size=300)
    assert alone.startswith("| name") and wide.count("| name") == 1
    assert passage in table and "option30 " in passage and len(passage) < len(wide)


def test_filter_holds_for_neighbors_and_a_deleted_result_stays() -> None:
    """A document of no file has no neighbors."""
    facts = [{"path": "f", "start": n, "stop": n + 4, "public": n != 5} for n in (0, 5, 10)]
    strange: list[dict[str, Any]] = [{"path": "a", "start": 0}, {"start": "x"}]
    with PyTorchGPURetriever(Hashed()) as retriever:
        retriever.add(["owls", "cats", "dogs"], facts, ["f#0", "f#5", "f#10"])
        retriever.add(["one tree", "two stones"], strange)
        where: Any
        for where in ({"public": True}, lambda each: each.get("public")):
            (found,) = retriever.search("owls", 1, where=where, mode="bm25", neighbors=1)
            assert "cats" not in found.text and "dogs" in found.text
        (found,) = retriever.search("cats", 1, mode="bm25")
        retriever.delete(["f#5"])
        assert with_neighbors(retriever.store, [found], 1) == [found]
        results = retriever.search("tree stones", 2, mode="bm25")
        assert retriever.search("tree stones", 2, mode="bm25", neighbors=2) == results
