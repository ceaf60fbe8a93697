"""What stands in for what an embedding model lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel, FaissRetriever, PyTorchGPURetriever
from rag_demo.encoding.embedder import Embedder, completed


class Basic:
    """The least that is asked."""

    dimension = 2

    def embed_query(self, text: str) -> Any:
        return np.asarray([len(text), 1.0])

    def embed_documents(self, texts: Any) -> Any:
        return np.stack([self.embed_query(text) for text in texts])


class Telling(Basic):
    """Has a name, batches its questions, and tells of its progress."""

    name = "telling"

    def embed_queries(self, texts: Any) -> Any:
        return 2 * self.embed_documents(texts)

    def embed_documents(self, texts: Any, *, on_progress: Any = None) -> Any:
        if on_progress is not None:
            for _ in texts:
                on_progress(1)
        return super().embed_documents(texts)


def test_the_least_is_enough() -> None:
    """Named by its class, asked one by one, and progress is told at the end."""
    told: list[int] = []
    model = completed(Basic())
    assert (model.name, model.dimension) == ("Basic", 2)
    assert np.shape(model.embed_queries(["a", "bb"])) == (2, 2)
    assert model.embed_documents(["a", "bb"], on_progress=told.append).shape == (2, 2)
    assert told == [2]


def test_what_is_there_is_used() -> None:
    """Its own name, its own batches, its own progress."""
    told: list[int] = []
    model = completed(Telling())
    assert model.name == "telling"
    assert model.embed_queries(["a"]).tolist() == [[2.0, 2.0]]
    model.embed_documents(["a", "bb"], on_progress=told.append)
    assert told == [1, 1]


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
@pytest.mark.parametrize("model", [Basic, Telling])
def test_retrievers_take_both(kind: Any, model: Any) -> None:
    """Progress adds up to the documents, whether the model tells of it or not."""
    told: list[int] = []
    with kind(model()) as retriever:
        retriever.add(["a", "bb", "ccc"], on_progress=told.append)
        assert sum(told) == 3
        assert retriever.search("a", top_k=1)[0].text == "a"


def test_embedding_model_has_it_all(tiny_model: Path) -> None:
    """Nothing has to stand in; the annotation is checked with the types."""
    with EmbeddingModel(tiny_model, device="cpu") as model:
        complete: Embedder = model
        assert complete.embed_queries(["a"]).shape == (1, complete.dimension)
