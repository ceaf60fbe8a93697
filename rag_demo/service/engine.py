"""Engine: the embedding model, the reranker and the index, each in a `ModelHost`.

The functions `embed` and `rerank` and the methods `Engine.search`, `Engine.get` and `Engine.page`
compute the inputs of jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rag_demo.encoding.embedder import as_embedder
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelMismatchError, RagDemoError
from rag_demo.places import load_manifest, make_retriever, open_indexes
from rag_demo.reranker import Reranker
from rag_demo.service import metrics
from rag_demo.service.settings import Settings
from rag_demo.vectors import normalized
from torch_utils import ModelHost

LoadModel = Callable[[], Any]
_BYTES_PER_TOKEN, _SPECIAL_TOKENS = 3, 2


def load_model(
    name: str | None, device: str | None, dtype: str | None, trust_remote_code: bool
) -> Any:
    """Load the embedding model. The host calls this in the process of the model."""
    from rag_demo.embedding_model import EmbeddingModel

    model = EmbeddingModel(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    return _used(model, lambda: model.embed_queries(["warm up"]))


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
    return _used(reranker, lambda: reranker.score_and_count("warm", ["up"]))


def _used(model: Any, use: Callable[[], object]) -> Any:
    """Use a model once, so that it is loaded; close it after an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(model)
        use()
        stack.pop_all()
    return model


class Hosted:
    """A model or the index in its host, for any number of threads.

    Args:
        host: The host.
        identity: The model that made the index; the loaded model must be the same. None for others.

    Attributes:
        error: Why the last load failed; None if it succeeded.
        has_loaded: Whether a load has succeeded.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
        dimension: Length of the model's vectors; 0 without them.
        batch_tokens: How many tokens the model computes together; 0 if that is unknown.
    """

    def __init__(self, host: ModelHost[Any], identity: ModelIdentity | None = None) -> None:
        self.host, self._identity = host, identity
        self.error: BaseException | None = None
        self.has_loaded = False
        self.max_tokens: int | None = None
        self.dimension = self.batch_tokens = 0
        self._checked = 0  # the number of the load that was checked

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function of the model in a new thread; load the model if it is not loaded.

        Raises:
            Exception: The load has failed, another model has been loaded, or the function failed.
        """
        has_begun = False

        def checked(model: Any) -> Any:
            nonlocal has_begun
            if self._checked != (loads := self.host.status().loads):
                self._check(model)
            self._checked, self.error, self.has_loaded, has_begun = loads, None, True, True
            return function(model)

        try:
            return await self.host.call(checked)
        except Exception as error:
            if not has_begun:
                self.error = error
            raise

    def _check(self, model: Any) -> None:
        """Compare identities: the model's files may have changed since the last load."""
        if self._identity is not None:
            identity = as_embedder(model).identity
            if not self._identity.is_same(identity):
                made_with = f"the index was made with {self._identity}"
                raise ModelMismatchError(f"{made_with}, not {identity}")
        self.max_tokens = getattr(model, "max_tokens", None)
        self.dimension = int(getattr(model, "dimension", 0))
        self.batch_tokens = int(getattr(model, "batch_tokens", 0))


class Engine:
    """The embedding model, the reranker and the index. Nothing is loaded until it is used.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        documents: How many documents the index has.
        version: A name for its state.
        databases: The open stores in databases.
        hosted: The models by the names of their lanes; the index is the last.
        refresh: Called in a thread before the index is read.

    Raises:
        RagDemoError: There is no index, or it is damaged or empty.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings = settings
        self.databases: list[Any] = []
        self.refresh: Callable[[], None] = lambda: None
        made_by = load_manifest(settings.index[0]).model
        if made_by is None:
            raise RagDemoError("the index is empty; add documents to it with: rag-demo add")
        self.set_state(*self.look())
        self.model_id = settings.model or made_by.name
        self.dtype = made_by.dtype or "float32"
        device, trust = settings.device, settings.trust_remote_code
        options: Any = {"keep_alive": settings.keep_alive, "isolation": settings.isolation}
        if settings.isolation == "process":
            options["call_timeout_s"] = settings.hang_timeout
        if load is None:
            load = partial(load_model, self.model_id, device, made_by.dtype, trust)
        name = settings.served_model_name or Path(self.model_id).name  # Without folders.
        self.model_name = "model" if name in ("", "index") else name
        self.identity = made_by
        self.model = Hosted(ModelHost(load, name=self.model_name, **options), made_by)
        self.hosted = {"model": self.model}
        if settings.reranker is not None:
            load = partial(load_reranker, settings.reranker, device, trust)
            host = ModelHost(load, name=Path(settings.reranker).name, **options)
            self.hosted["reranker"] = Hosted(host)
        # The index is mapped from its files, so an idle index costs little.
        self.index = Hosted(ModelHost(self._open, name="index", keep_alive=-1))
        self.hosted["index"] = self.index
        for figure in metrics.POOL_FIGURES:
            metrics.POOL.labels(figure).set_function(partial(self._pool, figure))

    def look(self) -> tuple[int, str]:
        """Read the number of documents and the version from the folders and databases."""
        manifests = [load_manifest(place) for place in self.settings.index]
        return sum(each.count for each in manifests), ", ".join(each.commit for each in manifests)

    def set_state(self, documents: int, version: str) -> None:
        """Set the number of documents and the version of the index that is in use."""
        self.documents, self.version = documents, version
        metrics.DOCUMENTS.set(documents)
        metrics.INDEX_VERSION.clear()
        metrics.INDEX_VERSION.labels(version).set(1)

    def _open(self) -> Any:
        settings = self.settings
        # A retriever gets the vectors of documents and queries from the queue.
        model = SimpleNamespace(
            identity=self.identity, dimension=None, embed_query=None, embed_documents=None
        )
        with contextlib.ExitStack() as stack:
            state = self.look()  # Before: the folders may change meanwhile.
            make = partial(make_retriever, settings.retriever, model, settings.device)
            retriever = open_indexes(settings.index, model, make, stack, check=True)
            stores = [each.store for each in shards_of(retriever)]
            self.databases = [store for store in stores if hasattr(store, "url")]
            self.set_state(*state)
            stack.pop_all()
        return retriever

    def stamp(self) -> list[Any]:
        """Return what differs after another process has changed a folder. Costs a few stats."""
        found: list[Any] = []
        for place in self.settings.index:
            # A folder or a file may be missing for a moment; that is a change too.
            with contextlib.suppress(OSError):
                for entry in place.iterdir() if isinstance(place, Path) else ():
                    status = entry.stat()
                    found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return sorted(found)

    async def reload(self, *, check: bool = True) -> None:
        """Open the folders again. The old state answers until the new one is open.

        Args:
            check: See `rag_demo.retriever.LocalRetriever.load`.

        Raises:
            RagDemoError: The index cannot be opened, or was made with another model.
        """

        def load(retriever: Any) -> None:
            state = self.look()
            for shard, place in self._folders(retriever):
                shard.load(place, check=check)
            self.set_state(*state)

        await self.index.call(load)

    async def change(self, change: Callable[[Any], Any]) -> Any:
        """Change the index and save it.

        Raises:
            IndexChangedError: Another process has changed the index.
        """

        def change_and_save(retriever: Any) -> Any:
            if result := change(retriever):  # Otherwise nothing was deleted.
                for shard, place in self._folders(retriever):
                    shard.save(place)
                self.set_state(*self.look())
            return result

        return await self.index.call(change_and_save)

    def _folders(self, retriever: Any) -> Iterator[tuple[Any, Path]]:
        """Yield the retrievers of folders with them; a database is its own state."""
        for shard, place in zip(shards_of(retriever), self.settings.index, strict=True):
            if isinstance(place, Path):
                yield shard, place

    def _pool(self, figure: str) -> int:
        return sum(each.pool_stats().get(figure, 0) for each in self.databases)

    def search(
        self, options: dict[str, Any], index: Any, inputs: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        """Return the results of queries with vectors; the mode bm25 needs no vectors."""
        self.refresh()
        queries, vectors = zip(*inputs, strict=True)
        known = None if options["mode"] == "bm25" else np.stack(vectors)
        found: list[Any] = index.search_batch(queries, **options, vectors=known)
        return found

    def get(self, index: Any, ids: Sequence[str]) -> list[Any]:
        """Return the document of each id, or None."""
        self.refresh()
        found: list[Any] = index.get(ids)
        return found

    def page(self, index: Any, inputs: Sequence[tuple[int, str | None]]) -> list[Any]:
        """Return a page of documents for each limit and last id."""
        self.refresh()
        return [index.documents(after=after, limit=limit) for limit, after in inputs]


def estimate(texts: Sequence[str], most: int | None = None) -> list[int]:
    """Return about how many tokens texts have: one for three bytes, and at most ``most``."""
    sizes = (len(text.encode("utf-8", "replace")) for text in texts)
    counts = (_SPECIAL_TOKENS + size // _BYTES_PER_TOKEN for size in sizes)
    return list(counts) if most is None else [min(count, most) for count in counts]


def embed(kind: str, model: Any, texts: Sequence[str]) -> list[tuple[Any, int]]:
    """Return the vector and the number of tokens of each text; 0 if the model cannot count."""
    embed_texts = as_embedder(model).embed_queries if kind == "query" else model.embed_documents
    vectors = normalized(embed_texts(list(texts)), len(texts))
    count = getattr(model, "count_tokens", None)
    counts = count(list(texts), kind) if count else [0] * len(texts)
    return list(zip(vectors, counts, strict=True))


def rerank(query: str, reranker: Any, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return the logit and the number of tokens of each text with the query."""
    return list(zip(*reranker.score_and_count(query, texts), strict=True))


def shards_of(retriever: Any) -> list[Any]:
    """Return the retrievers of several indexes, or the only one."""
    return getattr(retriever, "shards", [retriever])
