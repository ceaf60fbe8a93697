"""What a newcomer does wrong gets one clear error, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collections_of import Hashed

from programs import run, run_forked
from rag_demo import EmbeddingModel, PyTorchGPURetriever


@pytest.mark.parametrize("model", ["a name", None, 3, EmbeddingModel])
def test_no_embedding_model(model: Any) -> None:
    """A retriever refuses at once what cannot embed."""
    with pytest.raises(TypeError, match="is no embedding model"):
        PyTorchGPURetriever(model)


@pytest.mark.parametrize(
    "arguments", [{"model_name_or_path": 5}, {"workers": "2"}, {"batch_size": 2.5}]
)
def test_no_model(arguments: dict[str, Any]) -> None:
    """Nothing is looked up on a hub for what is no name."""
    with pytest.raises(TypeError, match=r"5|'2'|2\.5"):
        EmbeddingModel(**arguments)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """One line, and no traceback."""
    (tmp_path / "a.txt").write_text("text\n")
    out = tmp_path / "a.txt" / "index"
    result = run(
        "import sys; from rag_demo.cli import main; main()",
        *("index", str(tmp_path), "--out", str(out), "--no-cache"),
    )
    assert result.returncode == 2, str(result)
    assert result.stderr.startswith("rag-demo: error: "), str(result)
    assert result.stderr.count("\n") == 1, str(result)


def test_without_the_extra() -> None:
    """An import says what to install; the control is the bare error of another package."""
    result = run(
        """
        import sys
        sys.modules["numpy"] = None
        try:
            from rag_demo import PyTorchGPURetriever
        except ModuleNotFoundError as error:
            print(error)
        try:
            import numpy
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    named, bare = result.stdout.splitlines()
    assert "pip install" in named and "numpy" in named, str(result)
    assert "pip install" not in bare


def test_without_pystemmer() -> None:
    """Vectors are compared, saved, deleted and opened; only who asks for words needs it."""
    result = run_forked(
        """
        import sys, tempfile
        sys.modules["Stemmer"] = None
        from pathlib import Path
        from rag_demo import RagDemoError, PyTorchGPURetriever
        from rag_demo.documents.document import Document
        from rag_demo.ingest import ingest

        class Model:
            dimension = 2
            def embed_documents(self, texts):
                return [self.embed_query(text) for text in texts]
            def embed_query(self, text):
                return [len(text), 1]

        folder = Path(tempfile.mkdtemp())
        ingest([Document(str(n), "x" * n, {}) for n in range(1, 9)], Model(), folder)
        with PyTorchGPURetriever(Model(), device="cpu") as retriever:
            retriever.load(folder)
            retriever.delete(["1", "2", "3"])
            retriever.add(["xxxxxxxxx"])
            retriever.save(folder)
            retriever.load(folder)
            print(len(retriever), retriever.search("xxxxx", 1)[0].id)
            try:
                retriever.search("xxxxx", mode="bm25")
            except RagDemoError as error:
                print(error)
        """,
        quick_end=True,
    )
    found, missing = result.stdout.splitlines()
    assert found == "6 5", str(result)
    assert "needs PyStemmer" in missing


def test_numbers_without_an_end() -> None:
    """A whole number that JSON cannot be read back from is refused before anything changes."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        with pytest.raises(ValueError, match="4,000 digits"):
            retriever.add(["a"], [{"n": [10**4300]}])
        assert len(retriever) == 0
        retriever.add(["a"], [{"n": 10**3900}])
        assert retriever.search("a")[0].metadata == {"n": 10**3900}


def test_questions_of_any_kind_of_sequence() -> None:
    """Read once; numbers of numpy are numbers, and what is none is refused by name."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["a", "b"])
        found = retriever.search_batch((text for text in ("a", "b")), np.int64(1))
        assert [[hit.text for hit in hits] for hits in found] == [["a"], ["b"]]
        for wrong in ({"min_score": "x"}, {"min_score": [1]}):
            with pytest.raises(TypeError, match="min_score must be a number"):
                retriever.search("a", **wrong)


class Unshowable:
    def __repr__(self) -> str:
        raise OSError("the program's own code")


@pytest.mark.parametrize(
    "wrong",
    [Unshowable(), 10**5000, 10**4000, [None] * 9999, "x" * 9999],
    ids=["unshowable", "unwritable", "long", "list", "text"],
)
def test_messages_quote_the_beginning_of_anything(wrong: Any) -> None:
    """What a message says of a value is short, and never an error of its own."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["a"], [{"n": 1}])
        calls: list[Callable[[], Any]] = [
            lambda: retriever.add(["a", wrong if isinstance(wrong, int) else 1]),
            lambda: retriever.add(["a"], [wrong]),
            lambda: retriever.search("a", 0 if isinstance(wrong, int) else wrong),
            lambda: retriever.search("a", min_score=wrong),
            lambda: retriever.search("a", where=wrong),
            lambda: retriever.search("a", mode=wrong),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError)) as raised:
                call()
            assert len(str(raised.value)) < 400
            assert "4300 digits" not in str(raised.value)
        assert len(retriever) == 1
    for budget in (1.5, True, "1"):
        with pytest.raises(TypeError, match="memory_budget must be a whole number"):
            PyTorchGPURetriever(Hashed(), memory_budget=budget)  # type: ignore[arg-type]
