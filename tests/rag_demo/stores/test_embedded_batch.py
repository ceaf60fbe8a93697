"""All documents with their vectors go from one retriever to another without embedding."""

from typing import Any

import pytest

from tests.support.retriever_kinds import BOTH
from tests.support.small_collections import Hashed, text_of
from torch_utils import ResourceClosedError

LONG = "\n\n".join(f"Paragraph {n} is about {text_of(n)}. " * 8 for n in range(30))


@BOTH
def test_batches_of_a_store_make_the_same_index(kind: Any) -> None:
    """A close does not wait for their end."""
    with kind(Hashed()) as retriever, kind(Hashed()) as other:
        assert list(retriever.store.batches()) == []
        texts = [f"{text_of(n)} number{n}" for n in range(1100)]
        retriever.add(texts, [{"n": n} for n in range(1100)], passages=False)
        retriever.add([LONG], ids=["long"])
        retriever.update_metadata(["7"], [{"n": -7}])
        retriever.delete(["8"])
        for batch in retriever.store.batches():
            other.store.upsert(batch)
        query = "Paragraph 17 golf echo"
        expected = retriever.search(query, 50, mode="dense")
        assert other.search(query, 50, mode="dense") == expected
        assert other.search("number1021", mode="bm25")[0].id == "1021"
        assert other.get(["7", "8"]) == retriever.get(["7", "8"])
        assert len(other) == 1100
        unfinished = retriever.store.batches()
        next(unfinished)
        retriever.close()
        with pytest.raises(ResourceClosedError):
            next(unfinished)
