"""A reference RAG retriever built on torch_utils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_demo.documents.document import Document
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.encoding.model_identity import ModelIdentity
    from rag_demo.errors import IndexChangedError, ModelMismatchError, RagDemoError
    from rag_demo.faiss_retriever import FaissRetriever
    from rag_demo.pgvector_retriever import PgVectorRetriever
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from rag_demo.reranker import Reranker
    from rag_demo.retriever import Retriever, SearchResult
    from rag_demo.sharded_retriever import ShardedRetriever
    from rag_demo.stores.embed import embed
    from rag_demo.stores.store import EmbeddedBatch, Store

__all__ = [
    "Document",
    "EmbeddedBatch",
    "EmbeddingModel",
    "FaissRetriever",
    "IndexChangedError",
    "ModelIdentity",
    "ModelMismatchError",
    "PgVectorRetriever",
    "PyTorchGPURetriever",
    "RagDemoError",
    "Reranker",
    "Retriever",
    "SearchResult",
    "ShardedRetriever",
    "Store",
    "embed",
]

_MODULE_OF = {
    "Document": "documents.document",
    "EmbeddedBatch": "stores.store",
    "EmbeddingModel": "embedding_model",
    "FaissRetriever": "faiss_retriever",
    "IndexChangedError": "errors",
    "ModelIdentity": "encoding.model_identity",
    "ModelMismatchError": "errors",
    "PgVectorRetriever": "pgvector_retriever",
    "PyTorchGPURetriever": "pytorch_gpu_retriever",
    "RagDemoError": "errors",
    "Reranker": "reranker",
    "Retriever": "retriever",
    "SearchResult": "retriever",
    "ShardedRetriever": "sharded_retriever",
    "Store": "stores.store",
    "embed": "stores.embed",
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
