"""A reference RAG retriever built on torch_utils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.errors import IndexChangedError, RagDemoError
    from rag_demo.faiss_retriever import FaissRetriever
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from rag_demo.reranker import Reranker
    from rag_demo.retriever import Retriever, SearchResult

__all__ = [
    "EmbeddingModel",
    "FaissRetriever",
    "IndexChangedError",
    "PyTorchGPURetriever",
    "RagDemoError",
    "Reranker",
    "Retriever",
    "SearchResult",
]

_MODULE_OF = {
    "EmbeddingModel": "embedding_model",
    "FaissRetriever": "faiss_retriever",
    "IndexChangedError": "errors",
    "PyTorchGPURetriever": "pytorch_gpu_retriever",
    "RagDemoError": "errors",
    "Reranker": "reranker",
    "Retriever": "retriever",
    "SearchResult": "retriever",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__:
            raise
        from rag_demo.errors import HOW_TO_INSTALL

        raise ModuleNotFoundError(
            f"{name} needs {error.name}; {HOW_TO_INSTALL}", name=error.name
        ) from None
