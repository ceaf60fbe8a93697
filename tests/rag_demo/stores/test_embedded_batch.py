"""Reading, embedding and writing are three steps; what passes between them has an Arrow form."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import (
    Document,
    EmbeddedBatch,
    FaissRetriever,
    ModelIdentity,
    ModelMismatchError,
    embed,
)
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, text_of

LONG = "\n\n".join(f"Paragraph {n} is about {text_of(n)}. " * 8 for n in range(30))
DOCUMENTS = [
    Document("a\u00e9", "a text", {"year": 2020, "tags": ["x", None]}, "/folder/a.md"),
    Document("long", LONG, {"title": "A title"}),
    Document("", "", {}),
]


def through_parquet(table: Any) -> Any:
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(table, file)
    return parquet.read_table(io.BytesIO(file.getvalue()))


def assert_same(first: EmbeddedBatch, second: EmbeddedBatch) -> None:
    assert list(first.documents) == list(second.documents)
    for name in ("owners", "spans", "vectors"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.identity == second.identity


@pytest.mark.parametrize(
    "through", [lambda table: table, through_parquet], ids=["arrow", "parquet"]
)
def test_batch_comes_back_from_arrow(through: Any) -> None:
    batch = embed(DOCUMENTS, Hashed())
    assert len(batch.vectors) > len(DOCUMENTS)
    assert_same(EmbeddedBatch.from_arrow(through(batch.to_arrow())), batch)


def test_batch_without_vectors_or_owners_in_order_comes_back() -> None:
    bare = EmbeddedBatch.without_vectors(DOCUMENTS)
    assert_same(EmbeddedBatch.from_arrow(bare.to_arrow()), bare)
    batch = replace(embed(DOCUMENTS, Hashed()), identity=ModelIdentity("m", "float32", "f"))
    order = np.argsort(-batch.owners, kind="stable")
    parts = {name: getattr(batch, name)[order] for name in ("owners", "spans", "vectors")}
    assert_same(EmbeddedBatch.from_arrow(replace(batch, **parts).to_arrow()), batch)


def test_table_of_something_else_is_refused() -> None:
    import pyarrow

    with pytest.raises(ValueError, match="no column"):
        EmbeddedBatch.from_arrow(pyarrow.table({"id": ["a"]}))


@pytest.mark.parametrize(
    "kind", [OnCpu, pytest.param(FaissRetriever, marks=pytest.mark.slow)], ids=["torch", "faiss"]
)
def test_documents_come_back_from_parquet(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "documents.parquet"
    with kind(Hashed()) as retriever:
        assert retriever.export_parquet(file) == 0
        assert retriever.import_parquet(file) == 0
        texts = [f"{text_of(n)} number{n}" for n in range(2500)]
        retriever.add(texts, [{"n": n} for n in range(2500)])
        retriever.add([LONG], ids=["long"])
        retriever.update_metadata(["7"], [{"n": -7}])
        retriever.delete(["8"])
        assert retriever.export_parquet(file) == 2500
        before = file.read_bytes()
        retriever.add(["another text"], ids=["\ud800"])
        with pytest.raises(ValueError, match="surrogates"):
            retriever.export_parquet(file)
        retriever.delete(["\ud800"])
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]
        with kind(Hashed()) as other:
            assert other.import_parquet(file) == 2500
            query = "Paragraph 17 golf echo"
            expected = retriever.search(query, 50, mode="dense")
            assert other.search(query, 50, mode="dense") == expected
            assert other.search("number2121", mode="bm25")[0].id == "2121"
            assert other.get(["7", "8"]) == retriever.get(["7", "8"])


def test_parquet_of_another_model_is_refused(tmp_path: Path) -> None:
    class Other(Hashed):
        name = "another model"

    with OnCpu(Hashed()) as retriever, OnCpu(Other()) as other:
        retriever.add(["text"])
        retriever.export_parquet(tmp_path / "documents.parquet")
        with pytest.raises(ModelMismatchError):
            other.import_parquet(tmp_path / "documents.parquet")
        assert len(other) == 0
