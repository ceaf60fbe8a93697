"""Engine: the embedding model, the index and the reranker, each in a `ModelHost`.

A reload makes a second `Engine` with the same models and a new index.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rag_demo.encoding.embedder import as_embedder
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelMismatchError
from rag_demo.retriever import LocalRetriever, SearchResult
from rag_demo.service.filters import public_filter
from rag_demo.service.settings import Settings
from rag_demo.stores.index_format import read_manifest
from rag_demo.vectors import Vectors
from torch_utils import ModelHost

LoadModel = Callable[[], Any]
_LEASE_S = 120.0  # for a load or an unload in another thread


class SearchOptions(NamedTuple):
    """Options of a search; queries with equal options are searched together."""

    top_k: int
    min_score: float | None
    where: Mapping[str, Any] | None
    mode: str

    @property
    def key(self) -> tuple[object, ...]:
        """The options in a hashable form."""
        return self.top_k, self.min_score, repr(self.where), self.mode


@contextlib.contextmanager
def _close_on_error(close: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(close, *arguments)
        yield
        stack.pop_all()


def load_model(
    name: str | None, device: str | None, dtype: str | None, trust_remote_code: bool
) -> Any:
    """Load the embedding model. The host calls this in the process of the model."""
    from rag_demo.embedding_model import EmbeddingModel

    model = EmbeddingModel(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with _close_on_error(model.close):
        model.load_model()
    return model


def _load_reranker(name: str, device: str | None, trust_remote_code: bool) -> Any:
    from rag_demo.reranker import Reranker

    reranker = Reranker(name, device=device, trust_remote_code=trust_remote_code)
    with _close_on_error(reranker.close):
        reranker.score("warm", ["up"])
    return reranker


class _HostedModel:
    """The embedding model for a retriever: each call leases the model from its host.

    Attributes:
        error: Why the last load failed; None if it succeeded.
    """

    def __init__(self, host: ModelHost[Any]) -> None:
        self.host = host
        self.error: Exception | None = None
        self.dimension = 0
        self.max_tokens: int | None = None
        self._identity: ModelIdentity | None = None
        self._checked_loads = -1

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def identity(self) -> ModelIdentity:
        if self._identity is None:
            self.ensure_loaded()
        assert self._identity is not None
        return self._identity

    def ensure_loaded(self) -> None:
        with self.lease():
            pass

    def embed_query(self, text: str) -> Any:
        return self.embed_queries([text])[0]

    def embed_queries(self, texts: Sequence[str]) -> Any:
        with self.lease() as model:
            return as_embedder(model).embed_queries(texts)

    def embed_documents(self, texts: Sequence[str]) -> Any:
        with self.lease() as model:
            return model.embed_documents(list(texts))

    @contextlib.contextmanager
    def lease(self) -> Iterator[Any]:
        """Lend the model, which must have the same identity as at its first load."""
        with contextlib.ExitStack() as stack:
            try:
                model = stack.enter_context(self.host.lease(_LEASE_S))
            except Exception as error:  # The service is not ready until a load succeeds.
                self.error = error
                raise
            loads = self.host.status().loads
            if loads != self._checked_loads:
                self._check(model)
                self._checked_loads = loads
            self.error = None
            yield model

    def _check(self, model: Any) -> None:
        """Compare identities: the model's files may have changed since the last load."""
        identity = as_embedder(model).identity
        self.dimension = int(model.dimension)
        self.max_tokens = getattr(model, "max_tokens", None)
        if self._identity is None:
            self._identity = identity
        elif not self._identity.is_same(identity):
            self.error = ModelMismatchError(f"the model {self._identity} is now {identity}")
            raise self.error


class Engine:
    """The embedding model, the index and the reranker. Nothing is loaded until `open`.

    Any number of threads may search.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings = settings
        made_by = read_manifest(settings.index).model
        self.model_id = settings.model or made_by.name
        self.dtype = made_by.dtype or "float32"
        device, trust = settings.device, settings.trust_remote_code
        if load is None:
            load = partial(load_model, self.model_id, device, made_by.dtype, trust)
        name = Path(self.model_id).name
        self.model_name = "model" if name in ("", "index") else name
        self.model = self._host(load, self.model_name)
        self.reranker: ModelHost[Any] | None = None
        if settings.reranker is not None:
            load = partial(_load_reranker, settings.reranker, device, trust)
            self.reranker = self._host(load, f"reranker {Path(settings.reranker).name}")
        self.embedder = _HostedModel(self.model)
        self.documents = 0
        self.index = self._host_index()

    def _host(self, load: LoadModel, name: str) -> ModelHost[Any]:
        settings = self.settings
        most = settings.limits.answer_s
        call_timeout_s = min(settings.call_timeout_s or most, most)
        return ModelHost(
            load,
            name=name,
            keep_alive=settings.keep_alive,
            isolation=settings.isolation,
            call_timeout_s=call_timeout_s if settings.isolation == "process" else None,
        )

    def _host_index(self) -> ModelHost[LocalRetriever]:
        # The index is mapped from its file, so an idle index costs little.
        return ModelHost(self._open_index, name="index", keep_alive=-1)

    def _open_index(self) -> LocalRetriever:
        retriever: LocalRetriever
        if self.settings.retriever == "faiss":
            from rag_demo.faiss_retriever import FaissRetriever

            retriever = FaissRetriever(self.embedder)
        else:
            from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

            retriever = PyTorchGPURetriever(self.embedder, device=self.settings.device)
        with _close_on_error(retriever.close):
            retriever.load(self.settings.index)
        self._facts = read_manifest(self.settings.index)
        self.documents = len(retriever)
        return retriever

    @property
    def hosts(self) -> dict[str, ModelHost[Any]]:
        """All hosts by their names."""
        hosts = [self.model, self.index, *([self.reranker] if self.reranker else ())]
        return {host.name: host for host in hosts}

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded, which may take longer than any call."""
        return any(host.status().state == "loading" for host in self.hosts.values())

    def open(self) -> None:
        """Load the models, open the index and search once.

        Raises:
            RagDemoError: A model cannot be loaded, or the index cannot be opened. Everything is
                closed then.
        """
        with _close_on_error(self.close, 0):
            self.model.load()  # First: otherwise the model's size would count for the index.
            self._warm_up()
            if self.reranker is not None:
                self.reranker.load()

    def reopened(self) -> Engine:
        """Return an engine with the same models and a new index from the same folder.

        Raises:
            RagDemoError: The index cannot be opened, or was made with another model.
        """
        engine = copy.copy(self)
        engine.index = engine._host_index()
        with _close_on_error(engine.index.close, 0):
            engine._warm_up()
        return engine

    def _warm_up(self) -> None:
        with self.index.lease(_LEASE_S) as retriever:
            retriever.search("warm", 1)

    def embed(self, texts: Sequence[str], *, are_queries: bool) -> Vectors:
        """Embed texts: shape (n, d), float32."""
        embed = self.embedder.embed_queries if are_queries else self.embedder.embed_documents
        return np.asarray(embed(texts), np.float32)

    def count_tokens(self, texts: Sequence[str], *, are_queries: bool) -> list[int] | None:
        """Count the tokens of each text before truncation; None if the model cannot count."""
        with self.embedder.lease() as model:
            try:
                count = model.count_tokens
            except AttributeError:
                return None
            counts: list[int] | None = count(list(texts), "query" if are_queries else "document")
            return counts

    def search(
        self, queries: Sequence[str], vectors: Mapping[str, Any], options: SearchOptions
    ) -> list[list[SearchResult]]:
        """Search for queries; ``vectors`` must have a vector of each, unless the mode is bm25."""
        known = None if options.mode == "bm25" else np.stack([vectors[query] for query in queries])
        where = None if options.where is None else public_filter(options.where)
        with self.index.lease(_LEASE_S) as retriever:
            return retriever.search_batch(
                queries, options.top_k, options.min_score, where, mode=options.mode, vectors=known
            )

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score texts as answers to a query."""
        assert self.reranker is not None
        with self.reranker.lease(_LEASE_S) as reranker:
            return [float(score) for score in reranker.score(query, list(texts))]

    def change(self, change: Callable[[LocalRetriever], Any]) -> Any:
        """Change the index and save it. A change that cannot be saved is undone."""
        if (
            self.index.status().state == "loaded"
            and read_manifest(self.settings.index) != self._facts
        ):
            self.index.unload()  # Another process has changed the files.
        try:
            with self.index.lease(_LEASE_S) as retriever:
                result = change(retriever)
                retriever.save(self.settings.index)
                self._facts, self.documents = read_manifest(self.settings.index), len(retriever)
        except BaseException:  # After any failure the index must match its files again.
            self.index.unload()
            raise
        return result

    def close(self, deadline_s: float = 30.0) -> None:
        """Close all hosts, the index first.

        Args:
            deadline_s: How long to wait for the leases of each host, in seconds.
        """
        with contextlib.ExitStack() as stack:
            for host in (self.model, self.reranker, self.index):
                if host is not None:
                    stack.callback(host.close, deadline_s)
