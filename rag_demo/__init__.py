"""A reference RAG retriever built on torch_utils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_demo.embedding_model import EmbeddingModel as EmbeddingModel
    from rag_demo.encoding.embedder import BasicEmbedder as BasicEmbedder
    from rag_demo.encoding.model_identity import ModelIdentity as ModelIdentity
    from rag_demo.errors import IndexChangedError as IndexChangedError
    from rag_demo.errors import ModelMismatchError as ModelMismatchError
    from rag_demo.errors import RagDemoError as RagDemoError
    from rag_demo.faiss_retriever import FaissRetriever as FaissRetriever
    from rag_demo.pgvector_retriever import PgVectorRetriever as PgVectorRetriever
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever as PyTorchGPURetriever
    from rag_demo.reading.document import Document as Document
    from rag_demo.reranker import Reranker as Reranker
    from rag_demo.retriever import Retriever as Retriever
    from rag_demo.search_request import SearchRequest as SearchRequest
    from rag_demo.search_request import SearchResult as SearchResult
    from rag_demo.stores.ingest import embed as embed
    from rag_demo.stores.store import EmbeddedBatch as EmbeddedBatch
    from rag_demo.stores.store import Store as Store

_MODULE_OF = {
    **dict.fromkeys(["IndexChangedError", "ModelMismatchError", "RagDemoError"], "errors"),
    **dict.fromkeys(["SearchRequest", "SearchResult"], "search_request"),
    **dict.fromkeys(["EmbeddedBatch", "Store"], "stores.store"),
    "BasicEmbedder": "encoding.embedder",
    "Document": "reading.document",
    "EmbeddingModel": "embedding_model",
    "FaissRetriever": "faiss_retriever",
    "ModelIdentity": "encoding.model_identity",
    "PgVectorRetriever": "pgvector_retriever",
    "PyTorchGPURetriever": "pytorch_gpu_retriever",
    "Reranker": "reranker",
    "Retriever": "retriever",
    "embed": "stores.ingest",
}
# ``import *`` needs no psycopg.
__all__ = sorted(set(_MODULE_OF) - {"PgVectorRetriever"})


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from rag_demo.errors import required

    with required(name, ModuleNotFoundError):
        return getattr(import_module(f"{__name__}.{module}"), name)
