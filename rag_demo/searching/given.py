"""What is given to a retriever: checked, and copied, before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.documents.ids import first_twice
from rag_demo.documents.metadata import checked_metadata
from rag_demo.documents.rows import DocumentRows, texts_to_embed
from rag_demo.errors import shown
from rag_demo.searching.collection import Collection
from rag_demo.searching.modes import MODES

__all__ = ["Given", "check_names", "check_questions"]

_MOST_BITS = 1000  # of a whole number that fits into a float


@dataclass(frozen=True)
class Given:
    """Documents that are to be added.

    Attributes:
        texts: The documents.
        metadata: Of each.
        ids: Of each; None to choose names.
    """

    texts: list[str]
    metadata: list[dict[str, Any]]
    ids: list[str] | None

    @classmethod
    def checked(cls, texts: Any, metadata: Any, ids: Any) -> Given:
        """Check what was given; see `rag_demo.Retriever.add`.

        Raises:
            TypeError: A text or an id is no text, or metadata are not JSON.
            ValueError: Lengths differ, or an id stands twice.
        """
        if isinstance(texts, str):
            raise TypeError("add() takes a sequence of texts, not one text")
        if isinstance(ids, str):
            raise TypeError("add() takes a sequence of ids, not one id")
        for what, given in (("metadata", metadata), ("ids", ids)):
            if given is not None and len(given) != len(texts):
                raise ValueError(f"{len(texts)} texts but {len(given)} {what}: one for each")
        checked = [_text(text, f"text {number}") for number, text in enumerate(texts)]
        names = None if ids is None else [_text(name, "an id") for name in ids]
        if names is not None and (twice := first_twice(names)) is not None:
            raise ValueError(f"the id {shown(twice)} stands twice: ids must differ")
        known: Sequence[Mapping[str, Any]] = [{}] * len(checked) if metadata is None else metadata
        plain = [
            checked_metadata(each, f"text {number}" if names is None else shown(names[number]))
            for number, each in enumerate(known)
        ]
        return cls(checked, plain, names)

    def to_embed(self, passages: bool) -> tuple[list[str], DocumentRows]:
        """Say what is embedded, and which of that belongs to which document."""
        if not passages:
            return list(self.texts), DocumentRows(len(self.texts))
        return texts_to_embed(zip(self.texts, self.metadata, strict=True))

    def names(self, held: Collection) -> tuple[list[str], Collection]:
        """Return the documents' names; chosen ones are no other's."""
        if self.ids is not None:
            return list(self.ids), held
        return held.named(len(self.texts))

    def documents(self, names: Sequence[str]) -> list[Document]:
        """Make documents."""
        return list(map(Document, names, self.texts, self.metadata))


def check_names(ids: Any) -> list[str]:
    """Check ids of documents that are asked for.

    Raises:
        TypeError: One is no text.
    """
    if isinstance(ids, str):
        raise TypeError("delete() takes a sequence of ids, not one id")
    return [_text(name, "an id") for name in ids]


def check_questions(queries: Any, top_k: Any, min_score: Any, mode: Any) -> list[str]:
    """Check what was asked; see `rag_demo.Retriever.search_batch`.

    Returns:
        The questions.

    Raises:
        TypeError: A question is no text, or ``min_score`` no number.
        ValueError: ``top_k`` is not positive, ``min_score`` is NaN, or there is no such mode.
    """
    if isinstance(queries, str):
        raise TypeError("search_batch() takes a sequence of questions, not one; use search()")
    if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)) or top_k < 1:
        raise ValueError(f"top_k must be a positive whole number, not {shown(top_k)}")
    if not isinstance(min_score, (int, float, np.integer, np.floating, type(None))):
        raise TypeError(f"min_score must be a number, not {shown(min_score)}")
    is_huge = isinstance(min_score, int) and min_score.bit_length() > _MOST_BITS
    if is_huge or min_score != min_score:
        raise ValueError(f"min_score must be a number like scores, not {shown(min_score)}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {shown(mode)}")
    return [_text(query, "a question") for query in queries]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"{what} must be a str, not {shown(value)} of the type {kind}")
    return value
