"""Engine: the embedding model, the reranker and the index, each in a `ModelHost`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rag_demo.encoding.embedder import as_embedder
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelMismatchError, RagDemoError
from rag_demo.places import load_manifest, make_retriever, open_indexes
from rag_demo.reranker import Reranker
from rag_demo.retriever import SearchResult
from rag_demo.service.settings import Settings
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
        model.embed_queries(["warm up"])
    return model


class LogitReranker(Reranker):
    """A `Reranker` that gives logits, whatever activation its model has, and counts tokens."""

    def score_and_count(self, query: str, texts: Sequence[str]) -> tuple[list[float], list[int]]:
        """Return the logit and the number of tokens of each pair, before it is cut off."""
        import torch

        with self._in_use:
            self.ensure_open()
            encoder = self._model()
            encoder.activation_fn = torch.nn.Identity()
            pairs = encoder.tokenizer([query] * len(texts), list(texts), truncation=False)
            self.max_tokens = int(encoder.max_seq_length or encoder.tokenizer.model_max_length)
            return self.score(query, texts).tolist(), list(map(len, pairs["input_ids"]))


def load_reranker(name: str, device: str | None, trust_remote_code: bool) -> Any:
    """Load the reranker. The host calls this in the process of the model."""
    reranker = LogitReranker(name, device=device, trust_remote_code=trust_remote_code)
    with _close_on_error(reranker.close):
        reranker.score_and_count("warm", ["up"])
    return reranker


class Hosted:
    """A model in its host. One thread loads, and any thread may read the attributes.

    Args:
        host: The host.

    Attributes:
        error: Why the last load failed; None if it succeeded.
        has_loaded: Whether a load has succeeded.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
    """

    def __init__(self, host: ModelHost[Any]) -> None:
        self.host = host
        self.error: BaseException | None = None
        self.has_loaded = False
        self.max_tokens: int | None = None
        self._checked_loads = -1

    def load(self) -> None:
        """Load the model if it is not loaded.

        Raises:
            Exception: The load has failed.
        """
        try:
            self.host.load()
            loads = self.host.status().loads
            if loads != self._checked_loads:
                with self.lease() as model:
                    self.check(model)
                self._checked_loads = loads
        except BaseException as error:  # A tokenizer's panic or sys.exit() too.
            self.error = error
            raise
        self.error, self.has_loaded = None, True

    def check(self, model: Any) -> None:
        """Read what the model says about itself. Called after each load."""
        self.max_tokens = getattr(model, "max_tokens", None)

    def lease(self) -> Any:
        """Return a context manager that lends the model."""
        return self.host.lease(_LEASE_S)


class HostedEmbedder(Hosted):
    """The embedding model, as a retriever uses it.

    Args:
        host: The host.
        identity: The model that made the index; the loaded model must be the same.
    """

    def __init__(self, host: ModelHost[Any], identity: ModelIdentity) -> None:
        super().__init__(host)
        self.identity = identity
        self.dimension = 0

    def check(self, model: Any) -> None:
        """Compare identities: the model's files may have changed since the last load."""
        identity = as_embedder(model).identity
        if not self.identity.is_same(identity):
            raise ModelMismatchError(f"the index was made with {self.identity}, not {identity}")
        super().check(model)
        self.dimension = int(model.dimension)

    def embed_query(self, text: str) -> Any:
        """See `rag_demo.encoding.embedder.BasicEmbedder`."""
        return self.embed_queries([text])[0]

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """See `rag_demo.encoding.embedder.Embedder`."""
        with self.lease() as model:
            return np.asarray(as_embedder(model).embed_queries(texts), np.float32)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """See `rag_demo.encoding.embedder.Embedder`."""
        with self.lease() as model:
            return np.asarray(model.embed_documents(list(texts)), np.float32)

    def count_tokens(self, texts: Sequence[str], kind: str) -> list[int]:
        """Count the tokens of each text before truncation; 0 if the model cannot count."""
        with self.lease() as model:
            count = getattr(model, "count_tokens", None)
            return list(count(list(texts), kind)) if count else [0] * len(texts)


def shards_of(retriever: Any) -> list[Any]:
    """Return the retrievers of several indexes, or the only one."""
    return getattr(retriever, "shards", [retriever])


def _state(manifests: Sequence[Any]) -> tuple[int, str]:
    """Return the number of documents and the version of some indexes."""
    return sum(each.count for each in manifests), ", ".join(each.commit for each in manifests)


class Engine:
    """The embedding model, the reranker and the index. Nothing is loaded until it is used.

    Any number of threads may search.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        documents: How many documents the index has.
        version: A name for its state.
        databases: The open stores in databases.

    Raises:
        RagDemoError: There is no index, or it is damaged or empty.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings = settings
        manifests = [load_manifest(place) for place in settings.index]
        made_by = manifests[0].model
        if made_by is None:
            raise RagDemoError("the index is empty; add documents to it with: rag-demo add")
        self.documents, self.version = _state(manifests)
        self.databases: list[Any] = []
        self.model_id = settings.model or made_by.name
        self.dtype = made_by.dtype or "float32"
        device, trust = settings.device, settings.trust_remote_code
        if load is None:
            load = partial(load_model, self.model_id, device, made_by.dtype, trust)
        name = settings.served_model_name or Path(self.model_id).name  # Without folders.
        self.model_name = "model" if name in ("", "index") else name
        self.model = HostedEmbedder(self._host(load, self.model_name), made_by)
        self.reranker: Hosted | None = None
        if settings.reranker is not None:
            load = partial(load_reranker, settings.reranker, device, trust)
            self.reranker = Hosted(self._host(load, Path(settings.reranker).name))
        # The index is mapped from its files, so an idle index costs little.
        self.index: ModelHost[Any] = ModelHost(self._open, name="index", keep_alive=-1)

    def _host(self, load: LoadModel, name: str) -> ModelHost[Any]:
        settings = self.settings
        return ModelHost(
            load,
            name=name,
            keep_alive=settings.keep_alive,
            isolation=settings.isolation,
            call_timeout_s=settings.hang_timeout if settings.isolation == "process" else None,
        )

    def look(self) -> tuple[int, str]:
        """Read the number of documents and the version from the folders and databases."""
        return _state([load_manifest(place) for place in self.settings.index])

    def _open(self) -> Any:
        settings = self.settings
        with contextlib.ExitStack() as stack:
            state = self.look()  # Before: the folders may change meanwhile.
            make = partial(make_retriever, settings.retriever, self.model, settings.device)
            retriever = open_indexes(settings.index, self.model, make, stack)
            self.databases = [
                each.store for each in shards_of(retriever) if hasattr(each.store, "url")
            ]
            self.documents, self.version = state
            stack.pop_all()
        return retriever

    @property
    def models(self) -> list[Hosted]:
        """The embedding model, and the reranker if there is one."""
        return [self.model, *([self.reranker] if self.reranker else ())]

    @property
    def hosts(self) -> dict[str, ModelHost[Any]]:
        """All hosts by their names."""
        return {host.name: host for host in (*(each.host for each in self.models), self.index)}

    def reload(self) -> None:
        """Open the folders again. The old state answers until the new one is open.

        Raises:
            RagDemoError: The index cannot be opened, or was made with another model.
        """
        with self.index.lease(_LEASE_S) as retriever:
            state = self.look()
            for shard, place in self._folders(retriever):
                shard.load(place)
            self.documents, self.version = state

    def search(
        self, queries: Sequence[str], vectors: Mapping[str, Any], options: SearchOptions
    ) -> list[list[SearchResult]]:
        """Search for queries; ``vectors`` must have a vector of each, unless the mode is bm25."""
        known = None if options.mode == "bm25" else np.stack([vectors[query] for query in queries])
        with self.index.lease(_LEASE_S) as retriever:
            found: list[list[SearchResult]] = retriever.search_batch(
                queries, *options, vectors=known
            )
            return found

    def rerank(self, query: str, texts: Sequence[str]) -> Any:
        """Return the logits and the numbers of tokens of the texts with the query."""
        assert self.reranker is not None
        with self.reranker.lease() as reranker:
            return reranker.score_and_count(query, list(texts))

    def change(self, change: Callable[[Any], Any]) -> Any:
        """Change the index and save it.

        Raises:
            IndexChangedError: Another process has changed the index.
        """
        with self.index.lease(_LEASE_S) as retriever:
            if result := change(retriever):  # Otherwise nothing was deleted.
                for shard, place in self._folders(retriever):
                    shard.save(place)
                self.documents, self.version = self.look()
        return result

    def _folders(self, retriever: Any) -> Iterator[tuple[Any, Path]]:
        """Yield the retrievers of folders with them; a database is its own state."""
        for shard, place in zip(shards_of(retriever), self.settings.index, strict=True):
            if isinstance(place, Path):
                yield shard, place

    def pool(self, figure: str) -> int:
        """Return a figure of the pools of connections, by its name in psycopg_pool."""
        return sum(each.pool_stats().get(figure, 0) for each in self.databases)

    def close(self, deadline_s: float) -> None:
        """Close all hosts, the index first.

        Args:
            deadline_s: How long to wait for the leases of each host, in seconds.
        """
        with contextlib.ExitStack() as stack:
            for host in reversed(self.hosts.values()):
                stack.callback(host.close, deadline_s)
