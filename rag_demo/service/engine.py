"""Engine: the embedding model, the index and the reranker, each in a `ModelHost`.

A reload makes another `Engine` with the same models beside the one that answers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rag_demo.encoding.embedder import completed
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelMismatchError
from rag_demo.retriever import Retriever, SearchResult
from rag_demo.service.metadata import PublicFilters
from rag_demo.service.settings import Settings
from rag_demo.store.facts import read_facts
from rag_demo.vectors import Vectors
from torch_utils import ModelHost

__all__ = ["Engine", "LoadModel", "SearchOptions", "load_model"]

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
        """A hashable form."""
        return self.top_k, self.min_score, repr(self.where), self.mode


def load_model(
    name: str | None, device: str | None, dtype: str | None, trust_remote_code: bool
) -> Any:
    """Load the embedding model, in whichever process its host says."""
    from rag_demo.embedding_model import EmbeddingModel

    model = EmbeddingModel(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with contextlib.ExitStack() as stack:
        stack.callback(model.close)
        model.load_model()
        stack.pop_all()
    return model


def _load_reranker(name: str, device: str | None, trust_remote_code: bool) -> Any:
    from rag_demo.reranker import Reranker

    reranker = Reranker(name, device=device, trust_remote_code=trust_remote_code)
    with contextlib.ExitStack() as stack:
        stack.callback(reranker.close)
        reranker.score("warm", ["up"])
        stack.pop_all()
    return reranker


class _HostedModel:
    """The embedding model as a retriever uses it: leased from its host for each call."""

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
            with self.lease():
                pass
        assert self._identity is not None
        return self._identity

    def embed_query(self, text: str) -> Any:
        return self.embed_queries([text])[0]

    def embed_queries(self, texts: Sequence[str]) -> Any:
        with self.lease() as model:
            embed = getattr(model, "embed_queries", None)
            if embed is not None:
                return embed(list(texts))
            return np.stack([model.embed_query(text) for text in texts])

    def embed_documents(self, texts: Sequence[str]) -> Any:
        with self.lease() as model:
            return model.embed_documents(list(texts))

    @contextlib.contextmanager
    def lease(self) -> Iterator[Any]:
        """Lend the model, which must be the one that it was when it was first loaded."""
        try:
            lease = self.host.lease(_LEASE_S)
            model = lease.__enter__()
        except Exception as error:  # The service is not ready until a load succeeds.
            self.error = error
            raise
        with contextlib.ExitStack() as stack:
            stack.push(lease.__exit__)
            loads = self.host.status().loads
            if loads != self._checked_loads:
                self._check(model)
                self._checked_loads = loads
            self.error = None
            yield model

    def _check(self, model: Any) -> None:
        """Compare identities: the model's files may have changed while it was not loaded."""
        identity = getattr(model, "identity", None) or completed(model).identity
        self.dimension = int(model.dimension)
        self.max_tokens = getattr(model, "max_tokens", None)
        if self._identity is None:
            self._identity = identity
        elif not self._identity.is_same(identity):
            self.error = ModelMismatchError(f"the model is {identity} now, not {self._identity}")
            raise self.error


class Engine:
    """The embedding model, the index and the reranker. Loads nothing until `open`.

    Threads: any number may search.

    Args:
        settings: The service's.
        load: Loads another embedding model than the one that the index names.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings = settings
        made_by = read_facts(settings.index).model
        self.model_id = settings.model or made_by.name
        self.dtype = made_by.dtype or "float32"
        if load is None:
            load = partial(
                load_model,
                self.model_id,
                settings.device,
                made_by.dtype,
                settings.trust_remote_code,
            )
        name = Path(self.model_id).name
        self.model_name = "model" if name in ("", "index") else name
        self.model = self._host(load, self.model_name)
        self.reranker: ModelHost[Any] | None = None
        if settings.reranker is not None:
            load = partial(
                _load_reranker, settings.reranker, settings.device, settings.trust_remote_code
            )
            self.reranker = self._host(load, f"reranker {Path(settings.reranker).name}")
        self.embedder = _HostedModel(self.model)
        self.documents = 0
        self.index = self._host_index()

    def _host(self, load: LoadModel, name: str) -> ModelHost[Any]:
        in_process = self.settings.isolation == "process"
        return ModelHost(
            load,
            name=name,
            keep_alive=self.settings.keep_alive,
            isolation=self.settings.isolation,
            call_timeout_s=self.settings.model_call_s if in_process else None,
        )

    def _host_index(self) -> ModelHost[Retriever]:
        self._filters = PublicFilters()
        # Kept until somebody unloads it: it is mapped from its file.
        return ModelHost(self._open_index, name="index", keep_alive=-1)

    def _open_index(self) -> Retriever:
        retriever: Retriever
        if self.settings.retriever == "faiss":
            from rag_demo.faiss_retriever import FaissRetriever

            retriever = FaissRetriever(self.embedder)
        else:
            from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

            retriever = PyTorchGPURetriever(self.embedder, device=self.settings.device)
        with contextlib.ExitStack() as stack:
            stack.callback(retriever.close)
            retriever.load(self.settings.index)
            stack.pop_all()
        self._facts = read_facts(self.settings.index)
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
        """Load everything and search once.

        Raises:
            RagDemoError: Something cannot be opened; everything is closed then.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.close, 0)
            self.model.load()  # First: the index must not be charged with the model's size.
            self._warm_up()
            if self.reranker is not None:
                self.reranker.load()
            stack.pop_all()

    def reopened(self) -> Engine:
        """Return an engine with the same models and the index as it is now.

        Raises:
            RagDemoError: The index cannot be opened, or another model made it.
        """
        engine = copy.copy(self)
        engine.index = engine._host_index()
        with contextlib.ExitStack() as stack:
            stack.callback(engine.index.close, 0)
            engine._warm_up()
            stack.pop_all()
        return engine

    def _warm_up(self) -> None:
        with self.index.lease(_LEASE_S) as retriever:
            retriever.search("warm", 1)

    def embed(self, texts: Sequence[str], *, are_queries: bool) -> Vectors:
        """Embed texts: shape (n, d), float32."""
        embed = self.embedder.embed_queries if are_queries else self.embedder.embed_documents
        return np.asarray(embed(texts), np.float32)

    def count_tokens(self, texts: Sequence[str], *, are_queries: bool) -> list[int] | None:
        """Count the tokens of each text before it is cut off; None if the model cannot tell."""
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
        """Search for queries; ``vectors`` has those of all queries unless the mode is bm25."""
        known = None if options.mode == "bm25" else np.stack([vectors[query] for query in queries])
        with self.index.lease(_LEASE_S) as retriever:
            where, done = (None, None)
            if options.where is not None:
                where, done = self._filters.apply(options.where)
            found = retriever.search_batch(
                queries, options.top_k, options.min_score, where, mode=options.mode, vectors=known
            )
            if done is not None:
                done()
            return found

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score texts as answers to a query."""
        assert self.reranker is not None
        with self.reranker.lease(_LEASE_S) as reranker:
            return [float(score) for score in reranker.score(query, list(texts))]

    def change(self, change: Callable[[Retriever], Any]) -> Any:
        """Change the index and save it. A change that cannot be saved is undone."""
        if self.index.status().state == "loaded" and read_facts(self.settings.index) != self._facts:
            self.index.unload()  # Another process has written to it.
        try:
            with self.index.lease(_LEASE_S) as retriever:
                result = change(retriever)
                retriever.save(self.settings.index)
                self._facts, self.documents = read_facts(self.settings.index), len(retriever)
        except BaseException:  # Whatever it was, memory must be what the files are.
            self.index.unload()
            raise
        self._filters = PublicFilters()
        return result

    def close(self, deadline_s: float = 30.0) -> None:
        """Close all hosts, the index first; wait ``deadline_s`` for leases of each."""
        with contextlib.ExitStack() as stack:
            for host in (self.model, self.reranker, self.index):
                if host is not None:
                    stack.callback(host.close, deadline_s)
