"""Mistakes raise one clear error before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from support.programs import run, run_forked
from support.rag_command import fail
from support.small_collections import Hashed


@pytest.mark.parametrize("model", ["a name", None, 3, EmbeddingModel])
def test_retriever_refuses_an_object_that_cannot_embed(model: Any) -> None:
    with pytest.raises(TypeError, match="is not an embedding model"):
        PyTorchGPURetriever(model)


@pytest.mark.parametrize("arguments", [{"model_name_or_path": 5}, {"batch_size": 2.5}])
def test_wrong_model_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"5|'2'|2\.5"):
        EmbeddingModel(**arguments)


def test_unwritable_folder_is_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    out = tmp_path / "a.txt" / "index"
    assert "cannot be written" in fail("index", tmp_path, "--out", out, "--no-cache")


def test_import_without_the_extra_says_what_to_install() -> None:
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


def test_only_full_text_search_needs_pystemmer() -> None:
    result = run_forked(
        """
        import sys, tempfile
        sys.modules["Stemmer"] = None
        from pathlib import Path
        from rag_demo import RagDemoError, PyTorchGPURetriever

        class Model:
            dimension = 2
            def embed_documents(self, texts):
                return [self.embed_query(text) for text in texts]
            def embed_query(self, text):
                return [len(text), 1]

        folder = Path(tempfile.mkdtemp())
        with PyTorchGPURetriever(Model(), device="cpu") as retriever:
            names = [str(n) for n in range(1, 9)]
            retriever.add(["x" * n for n in range(1, 9)], ids=names)
            retriever.save(folder)
            retriever.load(folder)
            retriever.delete(["1", "2", "3"])
            retriever.add(["xxxxxxxxx"])
            retriever.save(folder)
            retriever.load(folder)
            print(len(retriever), retriever.search("xxxxx", 1, mode="dense")[0].id)
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


class Unshowable:
    def __repr__(self) -> str:
        raise OSError("the program's own code")


@pytest.mark.parametrize(
    "wrong",
    [Unshowable(), 10**5000, 10**4000, [None] * 9999, "x" * 9999],
    ids=["unshowable", "unwritable", "long", "list", "text"],
)
def test_messages_quote_the_beginning_of_any_value(wrong: Any) -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["a"], [{"n": 1}])
        calls: list[Callable[[], Any]] = [
            lambda: retriever.add(["a", wrong if isinstance(wrong, int) else 1]),  # type: ignore[list-item]  # wrong on purpose
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


def test_memory_budget_must_be_a_whole_number() -> None:
    for budget in (1.5, True, "1"):
        with pytest.raises(TypeError, match="memory_budget must be a whole number"):
            PyTorchGPURetriever(Hashed(), memory_budget=budget)  # type: ignore[arg-type]
