"""What a retriever returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["SearchResult", "Stats"]


class SearchResult(NamedTuple):
    """One answer.

    Attributes:
        rank: 1 for the best.
        score: Cosine similarity to the question, from -1 to 1; BM25's of its words; or a sum of
            ranks, if both were compared.
        id: The document's id.
        text: The document.
        metadata: What was given with it.
        passage: Start and stop of the span of the text that fits best, if it was split into
            passages and one of them scored higher than the whole; else None.
    """

    rank: int
    score: float
    id: str
    text: str
    metadata: Mapping[str, Any] = MappingProxyType({})  # A default is everybody's.
    passage: tuple[int, int] | None = None


@dataclass(frozen=True)
class Stats:
    """What a retriever holds.

    Attributes:
        size: Documents.
        dimension: Of the vectors; 0 while there are none.
        device: Where they are searched.
        dtype: What they are searched in.
        nbytes: Of the vectors, their rounded copies included; mapped files count as well.
    """

    size: int
    dimension: int
    device: str
    dtype: str
    nbytes: int
