"""Opened: one state of the index with the model that made it, each in a host of its own.

A reload makes another `Opened` beside the one that answers, and closes that one when its last
lease has ended.
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
from rag_demo.service.settings import Settings
from rag_demo.service.shown import Shown
from rag_demo.store.facts import read_facts
from rag_demo.store.filters import Where
from rag_demo.vectors import Vectors
from torch_utils import ModelHost

__all__ = ["Asked", "LoadModel", "Opened", "load_model"]

LoadModel = Callable[[], Any]
_LEASE_S = 120.0  # for a load of the model by somebody else


class Asked(NamedTuple):
    """What of the answers to a query is wanted; equal ones are searched together."""

    top_k: int
    min_score: float | None
    where: Where | None
    mode: str

    @property
    def key(self) -> tuple[object, ...]:
        """What says whether two are equal; a filter can be no key of a dict itself."""
        where = self.where if self.where is None or callable(self.where) else repr(self.where)
        return self.top_k, self.min_score, where, self.mode


def load_model(name: str | None, device: str | None, dtype: str | None) -> Any:
    """Load the embedding model: what a host is given, in whichever process."""
    from rag_demo.embedding_model import EmbeddingModel

    model = EmbeddingModel(name, device=device, dtype=dtype)
    try:
        model.load_model()
    except BaseException:  # Also an interrupt: nobody else has it yet.
        model.close()
        raise
    return model


class _HostedModel:
    """The embedding model as a retriever wants it: lent by its host for each call."""

    def __init__(self, host: ModelHost[Any]) -> None:
        self.host = host
        self._identity: ModelIdentity | None = None
        self._dimension = 0
        self._seen_loads = -1

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def identity(self) -> ModelIdentity:
        if self._identity is None:
            with self._lent():
                pass
        assert self._identity is not None
        return self._identity

    @property
    def dimension(self) -> int:
        if not self._dimension:
            with self._lent() as model:
                self._dimension = int(model.dimension)
        return self._dimension

    def embed_query(self, text: str) -> Any:
        return self.embed_queries([text])[0]

    def embed_queries(self, texts: Sequence[str]) -> Any:
        with self._lent() as model:
            embed = getattr(model, "embed_queries", None)
            if embed is not None:
                return embed(list(texts))
            return np.stack([model.embed_query(text) for text in texts])

    def embed_documents(self, texts: Sequence[str]) -> Any:
        with self._lent() as model:
            return model.embed_documents(list(texts))

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Any]:
        with self.host.lease(_LEASE_S) as model:
            loads = self.host.status().loads
            if loads != self._seen_loads:  # Its files may have changed while it was not loaded.
                self._check(model)
                self._seen_loads = loads
            yield model

    def _check(self, model: Any) -> None:
        try:
            identity = model.identity
        except AttributeError:
            identity = completed(model).identity
        if self._identity is None:
            self._identity = identity
        elif not self._identity.is_same(identity):
            raise ModelMismatchError(f"the model is {identity} now, not {self._identity}")


class Opened:
    """An index that can be searched, and the model for its questions.

    Nothing is loaded by making it; `open` does. Threads: any number may search.

    Args:
        settings: The service's.
        load: Loads another embedding model than that which the index names.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings = settings
        made_by = read_facts(settings.index).model
        wanted = settings.model or made_by.name
        if load is None:
            load = partial(load_model, wanted, settings.device, made_by.dtype)
        name = Path(wanted).name
        # The index has a name of its own, by which it is given back.
        self.model_name = "model" if name in ("", "index") else name
        self.model: ModelHost[Any] = ModelHost(
            load,
            name=self.model_name,
            keep_alive=settings.keep_alive,
            isolation=settings.isolation,
        )
        self._hosted = _HostedModel(self.model)
        self.documents = 0  # when the index was opened last
        self._shown = Shown()
        # Open until it is told otherwise: it is mapped from its file, and takes what it reads.
        self.index: ModelHost[Retriever] = ModelHost(self._open_index, name="index", keep_alive=-1)

    def _open_index(self) -> Retriever:
        retriever: Retriever
        if self.settings.retriever == "faiss":
            from rag_demo.faiss_retriever import FaissRetriever

            retriever = FaissRetriever(self._hosted)
        else:
            from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

            retriever = PyTorchGPURetriever(self._hosted, device=self.settings.device)
        try:
            retriever.load(self.settings.index)
        except BaseException:  # As above.
            retriever.close()
            raise
        self.documents, self._shown = len(retriever), Shown()
        return retriever

    @property
    def hosts(self) -> dict[str, ModelHost[Any]]:
        """Both, by the names that an administrator uses."""
        return {self.model_name: self.model, "index": self.index}

    def open(self) -> None:
        """Load the model, open the index, and answer a first question.

        Raises:
            RagDemoError: It cannot be; both are closed then.
        """
        try:
            self.model.load()  # First: the index would be told to have the model's size too.
            with self.index.lease(_LEASE_S) as retriever:
                retriever.search("warm", 1)
        except BaseException:  # As above.
            self.close(0)
            raise

    def reopened(self) -> Opened:
        """Return the same model with the index as it is now; this one goes on answering.

        Raises:
            RagDemoError: The index cannot be opened, or another model made it.
        """
        opened = copy.copy(self)
        opened.index = ModelHost(opened._open_index, name="index", keep_alive=-1)
        try:
            with opened.index.lease(_LEASE_S) as retriever:
                retriever.search("warm", 1)
        except BaseException:  # As above.
            opened.index.close(0)
            raise
        return opened

    def embed(self, texts: Sequence[str], *, are_queries: bool) -> Vectors:
        """Embed: shape (n, d), float32."""
        if are_queries:
            return np.asarray(self._hosted.embed_queries(texts), np.float32)
        return np.asarray(self._hosted.embed_documents(texts), np.float32)

    def search(
        self, queries: Sequence[str], vectors: Mapping[str, Any], asked: Asked
    ) -> list[list[SearchResult]]:
        """Search for queries, whose vectors are there already, or else are computed."""
        known = None
        if queries and all(query in vectors for query in queries):
            known = np.stack([vectors[query] for query in queries])
        with self.index.lease(_LEASE_S) as retriever:
            where, all_passed = self._shown.filter(asked.where)
            found = retriever.search_batch(
                queries, asked.top_k, asked.min_score, where, mode=asked.mode, vectors=known
            )
            all_passed()
            return found

    def close(self, deadline_s: float = 30.0) -> None:
        """Close both hosts, the index first; waits for leases."""
        try:
            self.index.close(deadline_s)
        finally:
            self.model.close(deadline_s)
