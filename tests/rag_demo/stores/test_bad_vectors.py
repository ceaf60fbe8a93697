"""A text without a usable vector is named and left out; a damaged model is an error."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rag_demo import Document, EmbeddingModel, PyTorchGPURetriever
from rag_demo.errors import ModelError
from rag_demo.stores.ingest import ingest
from tests.support.rag_command import fail, succeed, write_lines
from tests.support.small_collections import Hashed


class Faulty(Hashed):
    """Has no vector for some words; a fault may spoil every vector."""

    is_damaged = False

    def embed_documents(self, texts: Any) -> Any:
        vectors = np.array(super().embed_documents(texts))
        vectors[["zero" in text for text in texts]] = 0
        vectors[["nan" in text or self.is_damaged for text in texts]] = np.nan
        return vectors


def documents(**changed: str) -> list[Document]:
    texts = {f"d{n}": f"text {n}" for n in range(1000)} | changed
    return [Document(name, text, {}) for name, text in texts.items()]


BAD = {"d3": "a zero", "d700": "nan", "d999": "zero again"}


def test_bad_texts_are_skipped_and_named(tmp_path: Path) -> None:
    """Run again, nothing changes; corrected, they are indexed; bad again, they are removed."""
    first = ingest(documents(**BAD), Faulty(), tmp_path, source="s")
    assert (first.embedded, set(first.skipped)) == (997, set(BAD))
    assert first.skipped["d700"] == "with a vector that is not finite"
    again = ingest(documents(**BAD), Faulty(), tmp_path, source="s")
    assert (again.embedded, again.reused, set(again.skipped)) == (0, 997, set(BAD))
    assert ingest(documents(), Faulty(), tmp_path, source="s").embedded == 3
    ingest(documents(**BAD), Faulty(), tmp_path, source="s")
    with PyTorchGPURetriever(Faulty()) as retriever:
        assert retriever.load(tmp_path) == 997
        assert retriever.get(["d3", "d4"])[0] is None


def test_damaged_model_is_an_error_and_skips_nothing(tmp_path: Path) -> None:
    ingest(documents(), Faulty(), tmp_path, source="s")
    model = Faulty()
    model.is_damaged = True
    with pytest.raises(ModelError, match="is not finite"):
        ingest(documents(d1="changed"), model, tmp_path, source="s")
    with PyTorchGPURetriever(Faulty()) as retriever:
        assert retriever.load(tmp_path) == 1000


def test_damaged_model_is_one_line_of_search_and_evaluate(tmp_path: Path, tiny_model: Path) -> None:
    source, index, damaged = tmp_path / "source", tmp_path / "index", tmp_path / "model"
    (source / "qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        write_lines(source / f"{name}.jsonl", [{"_id": "1", "text": "give memory back"}])
    (source / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t1\t1\n")
    shutil.copytree(tiny_model, damaged)
    succeed("index", source / "corpus.jsonl", "--out", index, "--model", damaged)
    for path in damaged.rglob("model.safetensors"):
        save_file({name: value * np.nan for name, value in load_file(path).items()}, path)
    for arguments in (("search", index, "memory"), ("evaluate", source, "--index", index)):
        message = fail(*arguments, "--model", damaged)
        assert "model" in message and "\n" not in message.strip(), message


def test_add_names_the_text_and_changes_nothing() -> None:
    with PyTorchGPURetriever(Faulty(), device="cpu") as retriever:
        retriever.add(["good"], ids=["a"])
        with pytest.raises(ValueError, match="the vector of text 'c' is zero"):
            retriever.add(["fine", "a zero"], ids=["b", "c"])
        with pytest.raises(ValueError, match="the vector of text 1 is not finite"):
            retriever.add(["fine", "nan"])
        assert [*retriever.ids()] == ["a"]


def test_bad_passage_of_a_good_text_is_left_out() -> None:
    class WholeIsGood(Hashed):
        def embed_documents(self, texts: Any) -> Any:
            vectors = np.array(super().embed_documents(texts))
            vectors[["zero" in text and "paris" not in text for text in texts]] = 0
            return vectors

    text = "paris is the capital . " * 40 + "\n\n" + "zero " * 300
    with PyTorchGPURetriever(WholeIsGood(), device="cpu") as retriever:
        retriever.add([text], ids=["mixed"])
        (found,) = retriever.search("paris capital", mode="dense")
        assert found.passage is None or found.passage[0] < text.index("zero")


def test_query_without_a_vector_is_named() -> None:
    class NoQuery(Faulty):
        def embed_query(self, text: str) -> Any:
            return np.full(self.dimension, np.nan)

    with PyTorchGPURetriever(NoQuery(), device="cpu") as retriever:
        retriever.add(["good"])
        with pytest.raises(ModelError, match="the vector of 'a question' is not finite"):
            retriever.search("a question")


def test_vectors_that_are_not_finite_are_not_cached(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_demo.encoding.bert_encoder import BertEncoder

    def embed() -> Any:
        with EmbeddingModel(tiny_model, device="cpu", cache=tmp_path / "c.sqlite") as model:
            return model.embed_documents(["the cache", "paris"])

    launch = BertEncoder.launch
    with monkeypatch.context() as patch:
        patch.setattr(BertEncoder, "launch", lambda *one: launch(*one) * float("nan"))
        assert np.isnan(embed()).all()
    assert np.isfinite(embed()).all()


def test_url_of_a_database_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    from rag_demo import RagDemoError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RagDemoError, match=r"127\.0\.0\.1"):
        ingest([Document("a", "x", {})], Hashed(), "postgresql://me:secret@127.0.0.1:9/notes")
    assert not list(tmp_path.iterdir())


def test_tensors_of_any_dtype_are_vectors() -> None:
    torch = pytest.importorskip("torch")

    class Tensors(Hashed):
        def embed_documents(self, texts: Any) -> Any:
            return torch.tensor(np.array(super().embed_documents(texts)), requires_grad=True).to(
                torch.bfloat16
            )

    with PyTorchGPURetriever(Tensors(), device="cpu") as retriever:
        retriever.add(["one text", "another"])
        assert len(retriever) == 2
