"""The results of a retriever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple


class SearchResult(NamedTuple):
    """One answer.

    Attributes:
        rank: 1 for the best.
        score: The cosine similarity to the query, from -1 to 1; in the mode "bm25" the BM25
            score; in the mode "hybrid" a sum of reciprocal ranks.
        id: The document's id.
        text: The document's text.
        metadata: A copy of the document's metadata.
        passage: Start and stop of the best passage in the text: the nearest one, or for a result
            that only words have found, the one with most of them. None if the document has no
            passages or the whole text scored higher.
    """

    rank: int
    score: float
    id: str
    text: str
    metadata: Mapping[str, Any] = MappingProxyType({})  # All results share the default.
    passage: tuple[int, int] | None = None


@dataclass(frozen=True)
class Stats:
    """The size of a retriever.

    Attributes:
        size: How many documents there are.
        dimension: Length of the vectors; 0 without documents.
        device: The device that searches.
        dtype: The dtype that is searched.
        nbytes: Bytes of the vectors, of their rounded copies and of mapped files.
    """

    size: int
    dimension: int
    device: str
    dtype: str
    nbytes: int
