"""Mistakes raise one clear error before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from tests.support.programs import run


@pytest.mark.parametrize("model", ["a name", None, 3, EmbeddingModel])
def test_retriever_refuses_an_object_that_cannot_embed(model: Any) -> None:
    with pytest.raises(TypeError, match="is not an embedding model"):
        PyTorchGPURetriever(model)


@pytest.mark.parametrize("arguments", [{"model_name_or_path": 5}, {"batch_size": 2.5}])
def test_wrong_model_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"5|'2'|2\.5"):
        EmbeddingModel(**arguments)


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
