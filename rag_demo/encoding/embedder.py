"""The interface of embedding models, and what replaces their optional members."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import BadVectorsError, short_repr
from rag_demo.vectors import Vectors, normalized

_MEMBERS = ("dimension", "embed_query", "embed_documents")
_CHARS = 1000  # of a text that a model of unknown limit reads
_PROBE = "a text by which models without a name are told apart"


OnProgress = Callable[[int], object] | None
"""Called with the number of texts embedded since the last call."""


class BasicEmbedder(Protocol):
    """The minimal embedding model; `EmbeddingModel` has more members, which are optional."""

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


def identity_of(model: BasicEmbedder) -> ModelIdentity:
    """Return the identity of a model. A saved index opens only with the model that made it.

    A model without a name is identified by its class and the vector of one text.
    """
    if known := known_identity(model):
        return known
    (probe,) = embed_queries(model, [_PROBE])
    return ModelIdentity(type(model).__name__, probe=tuple(probe.tolist()))


def known_identity(model: BasicEmbedder) -> ModelIdentity | None:
    """Return the identity of a model; None if it takes an embedding to know it."""
    identity, name = getattr(model, "identity", None), getattr(model, "name", None)
    if isinstance(identity, ModelIdentity):
        return identity
    return ModelIdentity(name) if isinstance(name, str) else None


def lengths(model: BasicEmbedder, texts: Sequence[str]) -> Sequence[float]:
    """Return the length of each text as a document, divided by what the model reads.

    A model of unknown limit is taken to read 1,000 characters.
    """
    limit, count = getattr(model, "max_tokens", None), getattr(model, "count_tokens", None)
    counts = limit and count and count(list(texts))
    if not counts:
        return [len(text) / _CHARS for text in texts]
    return [each / limit for each in counts]


def embed_queries(model: BasicEmbedder, texts: Sequence[str]) -> Vectors:
    """Embed queries, together if the model can: shape (n, d), each row of length 1."""
    embed = getattr(model, "embed_queries", None)
    vectors = embed(list(texts)) if embed is not None else list(map(model.embed_query, texts))
    try:
        return _checked(model, vectors, len(texts))
    except BadVectorsError as error:
        query = short_repr(texts[min(error.rows)])
        raise BadVectorsError(error.rows, error.vectors, f"the vector of {query}") from None


def embed_documents(
    model: BasicEmbedder, texts: Sequence[str], on_progress: OnProgress = None
) -> Vectors:
    """Embed documents: shape (n, d), each row of length 1.

    Args:
        model: The model.
        texts: The documents.
        on_progress: See `OnProgress`. If the model reports no progress, called once, at the end.
    """
    embed: Any = model.embed_documents
    if on_progress is not None and "on_progress" in inspect.signature(embed).parameters:
        return _checked(model, embed(list(texts), on_progress=on_progress), len(texts))
    vectors = _checked(model, embed(list(texts)), len(texts))
    if on_progress is not None:
        on_progress(len(texts))
    return vectors


def check_works(model: BasicEmbedder) -> None:
    """Embed an ordinary text.

    Raises:
        BadVectorsError: Its vector is not finite, so the model or the device is damaged.
    """
    try:
        embed_documents(model, [_PROBE])
    except BadVectorsError as error:
        if error.rows[0] != "zero":  # Of a model without words of this language.
            raise


def _checked(model: BasicEmbedder, vectors: Any, count: int) -> Vectors:
    if hasattr(vectors, "detach"):  # A tensor, maybe on a device, or of a dtype that numpy lacks.
        vectors = vectors.detach().float().cpu()
    checked, dimension = normalized(vectors, count), model.dimension
    if dimension and checked.shape[1] != dimension:
        raise ValueError(
            f"the embedding model returned vectors of {checked.shape[1]} numbers, but its "
            f"dimension is {dimension}; correct one of them"
        )
    return checked
