"""The interface of embedding models, and an adapter that completes a minimal one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import short_repr

_MEMBERS = ("dimension", "embed_query", "embed_documents")
_CHARS = 1000  # of a text that a model of unknown limit reads


_PROBE = "a text by which models without a name are told apart"


class BasicEmbedder(Protocol):
    """The minimal embedding model; `Embedder` adds the rest."""

    @property
    def dimension(self) -> int:
        """Length of its vectors."""

    def embed_query(self, text: str) -> Any:
        """Embed one query: shape (d,)."""

    def embed_documents(self, texts: Sequence[str]) -> Any:
        """Embed documents: shape (n, d)."""


def check_embedding_model(model: object) -> None:
    """Check that an object has the members of `BasicEmbedder`.

    Raises:
        TypeError: It lacks one, or is a class.
    """
    members = {*dir(type(model)), *getattr(model, "__dict__", ())}
    if isinstance(model, type) or not members.issuperset(_MEMBERS):
        raise TypeError(
            f"{short_repr(model)} is not an embedding model; pass an EmbeddingModel, or an object "
            f"with {', '.join(_MEMBERS)}"
        )


class Embedder:
    """A complete embedding model over a `BasicEmbedder`.

    The defaults for missing members: an identity by name, or else by class and the vector of one
    text; a limit of 1,000 characters, queries that are embedded one by one, and one report of
    progress at the end.
    """

    def __init__(self, model: BasicEmbedder) -> None:
        self._model = model

    @property
    def identity(self) -> ModelIdentity:
        """The identity. A saved index opens only with the model that made it."""
        if known := self.known_identity:
            return known
        probe = np.ravel(np.asarray(self._model.embed_query(_PROBE), float))
        return ModelIdentity(type(self._model).__name__, probe=tuple(probe.round(6).tolist()))

    @property
    def known_identity(self) -> ModelIdentity | None:
        """The identity; None if it takes an embedding to know it."""
        identity = getattr(self._model, "identity", None)
        if isinstance(identity, ModelIdentity):
            return identity
        name = getattr(self._model, "name", None)
        return ModelIdentity(name) if isinstance(name, str) else None

    def lengths(self, texts: Sequence[str]) -> Sequence[float]:
        """Return the length of each text as a document, divided by what the model reads."""
        limit = getattr(self._model, "max_tokens", None)
        counts = limit and self._model.count_tokens(list(texts))  # type: ignore[attr-defined]  # it has both
        if not counts:
            return [len(text) / _CHARS for text in texts]
        return [count / limit for count in counts]

    def embed_queries(self, texts: Sequence[str]) -> Any:
        """Embed queries: shape (n, d)."""
        embed = getattr(self._model, "embed_queries", None)
        if embed is not None:
            return embed(list(texts))
        return [self._model.embed_query(text) for text in texts]

    def embed_documents(
        self, texts: Sequence[str], *, on_progress: Callable[[int], object] | None = None
    ) -> Any:
        """Embed documents: shape (n, d).

        Args:
            texts: The documents.
            on_progress: Called with the number of texts embedded since the last call.
        """
        embed: Any = self._model.embed_documents
        if on_progress is None:
            return embed(list(texts))
        if "on_progress" in inspect.signature(embed).parameters:
            return embed(list(texts), on_progress=on_progress)
        vectors = embed(list(texts))
        on_progress(len(texts))
        return vectors
