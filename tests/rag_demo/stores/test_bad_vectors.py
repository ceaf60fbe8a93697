"""A text without a usable vector is named and left out; a damaged model is an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo import Document, EmbeddingModel
from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.errors import ModelError
from rag_demo.stores.ingest import ingest
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed


class Faulty(Hashed):
    """Has no vector for some words; a fault may spoil every vector."""

    is_damaged = False

    def embed_documents(self, texts: Any) -> Any:
        vectors = np.array(super().embed_documents(texts))
        vectors[["zero" in text and "paris" not in text for text in texts]] = 0
        vectors[["nan" in text or self.is_damaged for text in texts]] = np.nan
        return vectors


def documents(**changed: str) -> list[Document]:
    texts = {f"d{n}": f"text {n}" for n in range(100)} | changed
    return [Document(name, text, {}) for name, text in texts.items()]


BAD = {"d3": "a zero", "d70": "nan", "d99": "zero again"}


def test_bad_texts_are_skipped_and_named(tmp_path: Path) -> None:
    """Run again, nothing changes; corrected, they are indexed; bad again, they are removed.

    If all are bad, the model is at fault, and nothing changes.
    """
    model = Faulty()
    first = ingest(documents(**BAD), model, tmp_path, source="s")
    assert (first.embedded, set(first.skipped)) == (97, set(BAD))
    assert first.skipped["d70"] == "with a vector that is not finite"
    again = ingest(documents(**BAD), model, tmp_path, source="s")
    assert (again.embedded, again.reused, set(again.skipped)) == (0, 97, set(BAD))
    assert ingest(documents(), model, tmp_path, source="s").embedded == 3
    ingest(documents(**BAD), model, tmp_path, source="s")
    model.is_damaged = True
    with pytest.raises(ModelError, match="is not finite"):
        ingest(documents(d1="changed"), model, tmp_path, source="s")
    with OnCpu(Faulty()) as retriever:
        assert retriever.load(tmp_path) == 97
        assert retriever.get(["d3", "d1"]) == [None, Document("d1", "text 1", {})]


def test_bad_passage_of_a_good_text_is_left_out() -> None:
    text = "paris is the capital . " * 40 + "\n\n" + "zero " * 300
    with OnCpu(Faulty()) as retriever:
        retriever.add([text], ids=["mixed"])
        (found,) = retriever.search("paris capital", mode="dense")
        assert found.passage is None or found.passage[0] < text.index("zero")


def test_query_without_a_vector_is_named() -> None:
    model = Faulty()
    with OnCpu(model) as retriever:
        retriever.add(["good"])
        model.is_damaged = True
        with pytest.raises(ModelError, match="the vector of 'a question' is not finite"):
            retriever.search("a question")


def test_bad_vectors_are_not_cached(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def embed() -> Any:
        with EmbeddingModel(tiny_model, device="cpu", cache=tmp_path / "c.sqlite") as model:
            return model.embed_documents(["the cache", "paris"])

    launch = BertEncoder.launch
    with monkeypatch.context() as patch:
        patch.setattr(BertEncoder, "launch", lambda *one: launch(*one) * float("nan"))
        assert np.isnan(embed()).all()
    assert np.isfinite(embed()).all()


def test_tensors_of_any_dtype_are_vectors() -> None:
    class Tensors(Hashed):
        def embed_documents(self, texts: Any) -> Any:
            vectors = torch.tensor(super().embed_documents(texts), requires_grad=True)
            return vectors.to(torch.bfloat16)

    with OnCpu(Tensors()) as retriever:
        retriever.add(["one text", "another"])
        assert len(retriever) == 2
