"""search(..., neighbors=N): the passages before and after a result, in one text."""

from pathlib import Path
from typing import Any

import pytest

from rag_demo import PyTorchGPURetriever, SearchResult
from rag_demo.errors import InvalidValueError
from rag_demo.neighbors import with_neighbors
from rag_demo.reading.sources import Reading, Skipped, read_source
from tests.support.small_collections import Hashed

TEXT = "\n\n".join(
    f"Paragraph {n} is about {name}, and has a few more words so that it fills a passage."
    for n, name in enumerate(("zebras", "lions", "owls", "whales", "bees", "ants"))
)


def search(folder: Path, query: str, count: int, **options: Any) -> tuple[SearchResult, ...]:
    """Return the result without neighbors, and with them."""
    with PyTorchGPURetriever(Hashed()) as retriever:
        _, texts, metadata = zip(
            *((each.id, each.text, each.metadata)
              for each in read_source(str(folder), Skipped(), Reading(**options))), strict=True
        )  # fmt: skip
        ids = [f"{each['source']}#{each['start']}" for each in metadata]
        retriever.add(texts, metadata, ids)
        (alone,) = retriever.search(query, 1, mode="bm25")
        (wide,) = retriever.search(query, 1, mode="bm25", neighbors=count)
        return alone, wide


@pytest.mark.parametrize("overlap", [0, 40])
@pytest.mark.parametrize(("query", "count", "first", "last"), [
    ("owls", 1, 1, 3), ("zebras", 1, 0, 1), ("ants", 2, 3, 5), ("owls", 9, 0, 5), ("owls", 0, 2, 2),
])  # fmt: skip
def test_text_includes_what_stands_around(
    tmp_path: Path, overlap: int, query: str, count: int, first: int, last: int
) -> None:
    tmp_path.joinpath("a.txt").write_text(TEXT)
    tmp_path.joinpath("b.txt").write_text(TEXT.replace("owls", "cows"))
    options = {"chunk_size": 100, "chunk_overlap": 0 if count > 1 else overlap}
    alone, wide = search(tmp_path, query, count, **options)
    assert wide.text in TEXT
    assert f"Paragraph {first}" in wide.text and f"Paragraph {last}" in wide.text
    assert f"Paragraph {last + 1}" not in wide.text
    if count:
        assert wide.passage is not None
        assert wide.text[slice(*wide.passage)] == alone.text
    assert (wide.id, wide.score, wide.rank) == (alone.id, alone.score, alone.rank)


def test_header_of_a_table_is_not_repeated(tmp_path: Path) -> None:
    rows = "".join(f"| option{n} | {n} seconds of waiting |\n" for n in range(60))
    table = f"| name | meaning |\n|---|---|\n{rows}"
    tmp_path.joinpath("a.md").write_text(f"Before it.\n\n{table}\n\nAfter the table.")
    alone, wide = search(tmp_path, "option30", 1, chunk_size=300)
    assert alone.text.startswith("| name")
    assert wide.text.count("| name") == 1 and wide.passage is not None
    assert wide.text[slice(*wide.passage)] in table
    assert "option30 " in wide.text[slice(*wide.passage)]


def test_passages_that_overlap_are_joined_once(tmp_path: Path) -> None:
    text = " ".join(f"word{n}" for n in range(400))
    tmp_path.joinpath("a.txt").write_text(text)
    alone, wide = search(tmp_path, "word200", 2, chunk_size=100, chunk_overlap=60)
    assert wide.text in text and len(wide.text) > len(alone.text) + 100
    assert wide.passage is not None and wide.text[slice(*wide.passage)] == alone.text


def test_filter_holds_for_neighbors_and_a_deleted_result_stays(tmp_path: Path) -> None:
    def facts(start: int, **more: object) -> dict[str, object]:
        return {"path": "f", "start": start, "stop": start + 4, **more}

    with PyTorchGPURetriever(Hashed()) as retriever:
        retriever.add(
            ["owls", "cats", "dogs"],
            [facts(0, public=True), facts(5, public=False), facts(10, public=True)],
            ["f#0", "f#5", "f#10"],
        )
        where: Any
        for where in ({"public": True}, lambda each: each["public"]):
            (found,) = retriever.search("owls", 1, where=where, mode="bm25", neighbors=1)
            assert "cats" not in found.text and "dogs" in found.text
        (found,) = retriever.search("cats", 1, mode="bm25")
        retriever.delete(["f#5"])
        assert with_neighbors(retriever.store, [found], 1) == [found]


def test_document_of_no_file_stays_as_it_is() -> None:
    with PyTorchGPURetriever(Hashed()) as retriever:
        retriever.add(["one owl", "two cats"], [{"path": "a", "start": 0}, {"start": "x"}])
        assert retriever.search("owl", neighbors=2) == retriever.search("owl")
        for wrong in (-1, 1.5, True):
            with pytest.raises(InvalidValueError, match="neighbors must be"):
                retriever.search("owl", neighbors=wrong)  # type: ignore[arg-type]
