"""What a newcomer does wrong gets one clear error, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from programs import run
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
