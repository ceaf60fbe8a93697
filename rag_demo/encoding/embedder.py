"""Embedder: all that is asked of an embedding model, and what stands in for what one lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rag_demo.encoding.model_identity import ModelIdentity

__all__ = ["BasicEmbedder", "Embedder", "completed"]


class BasicEmbedder(Protocol):
    """The least that an embedding model has to have; `completed` makes the rest of it."""

    @property
    def dimension(self) -> int:
        """Length of its vectors."""

    def embed_query(self, text: str) -> Any:
        """Embed one question: shape (d,)."""

    def embed_documents(self, texts: Sequence[str]) -> Any:
        """Embed documents: shape (n, d)."""


class Embedder(Protocol):
    """All that is asked of an embedding model."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    @property
    def identity(self) -> ModelIdentity:
        """Says which model it is; a saved index is opened with the model that made it only."""

    @property
    def dimension(self) -> int:
        """Length of its vectors."""

    def embed_query(self, text: str) -> Any:
        """Embed one question: shape (d,)."""

    def embed_queries(self, texts: Sequence[str]) -> Any:
        """Embed questions: shape (n, d)."""

    def embed_documents(
        self, texts: Sequence[str], *, on_progress: Callable[[int], object] | None = None
    ) -> Any:
        """Embed documents: shape (n, d).

        Args:
            texts: The documents.
            on_progress: Called now and then with the count of texts done since the last call.
        """


def check_embedding_model(model: object) -> None:
    """Refuse what cannot embed, before anything is done with it.

    Raises:
        TypeError: It lacks a method that every embedding model has.
    """
    lacking = [
        name
        for name in ("dimension", "embed_query", "embed_documents")
        if not hasattr(type(model), name) and name not in getattr(model, "__dict__", ())
    ]
    if lacking or isinstance(model, type):
        raise TypeError(
            f"{model!r} is no embedding model: it has no {', '.join(lacking) or 'instance'}; pass "
            "an EmbeddingModel, or an object with dimension, embed_query and embed_documents"
        )


def completed(model: BasicEmbedder) -> Embedder:
    """Make an embedding model answer to all that is asked of one.

    What it has is used; without it, its class names it and its name identifies it, questions are
    embedded one by one, and progress is told once, at the end.
    """
    return _Completed(model)


class _Completed:
    def __init__(self, model: BasicEmbedder) -> None:
        self._model = model

    @property
    def name(self) -> str:
        name = getattr(self._model, "name", None)
        return name if isinstance(name, str) else type(self._model).__name__

    @property
    def identity(self) -> ModelIdentity:
        identity = getattr(self._model, "identity", None)
        return identity if isinstance(identity, ModelIdentity) else ModelIdentity(self.name)

    @property
    def dimension(self) -> int:
        return self._model.dimension

    def embed_query(self, text: str) -> Any:
        return self._model.embed_query(text)

    def embed_queries(self, texts: Sequence[str]) -> Any:
        embed = getattr(self._model, "embed_queries", None)
        if embed is not None:
            return embed(list(texts))
        return [self._model.embed_query(text) for text in texts]

    def embed_documents(
        self, texts: Sequence[str], *, on_progress: Callable[[int], object] | None = None
    ) -> Any:
        embed: Any = self._model.embed_documents
        if on_progress is not None and _takes_on_progress(embed):
            return embed(list(texts), on_progress=on_progress)
        vectors = embed(list(texts))
        if on_progress is not None:
            on_progress(len(texts))
        return vectors


def _takes_on_progress(function: Callable[..., Any]) -> bool:
    try:
        return "on_progress" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # A function of C that does not say what it takes.
        return False
