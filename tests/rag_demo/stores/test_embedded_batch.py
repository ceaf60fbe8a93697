"""All documents with their vectors go from one retriever to another without embedding."""

from typing import Any

import pytest

from rag_demo import FaissRetriever, ModelMismatchError
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, text_of

LONG = "\n\n".join(f"Paragraph {n} is about {text_of(n)}. " * 8 for n in range(30))


@pytest.mark.parametrize(
    "kind", [OnCpu, pytest.param(FaissRetriever, marks=pytest.mark.slow)], ids=["torch", "faiss"]
)
def test_batches_of_a_store_make_the_same_index(kind: Any) -> None:
    with kind(Hashed()) as retriever, kind(Hashed()) as other:
        assert list(retriever.store.batches()) == []
        texts = [f"{text_of(n)} number{n}" for n in range(2500)]
        retriever.add(texts, [{"n": n} for n in range(2500)])
        retriever.add([LONG], ids=["long"])
        retriever.update_metadata(["7"], [{"n": -7}])
        retriever.delete(["8"])
        for batch in retriever.store.batches():
            other.store.upsert(batch)
        query = "Paragraph 17 golf echo"
        expected = retriever.search(query, 50, mode="dense")
        assert other.search(query, 50, mode="dense") == expected
        assert other.search("number2121", mode="bm25")[0].id == "2121"
        assert other.get(["7", "8"]) == retriever.get(["7", "8"])
        assert len(other) == 2500


def test_batch_of_another_model_is_refused() -> None:
    class Other(Hashed):
        name = "another model"

    with OnCpu(Hashed()) as retriever, OnCpu(Other()) as other:
        retriever.add(["text"])
        other.add(["another text"])
        for batch in retriever.store.batches():
            with pytest.raises(ModelMismatchError):
                other.store.upsert(batch)
        assert len(other) == 1
