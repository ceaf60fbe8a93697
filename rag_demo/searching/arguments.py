"""Checks and copies of a retriever's arguments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rag_demo.errors import InvalidValueError, checked_texts, short_repr
from rag_demo.reading.document import checked_metadata
from rag_demo.reading.passages import PASSAGE_CHARS

MODES = ("dense", "bm25", "hybrid")
RANK_CONSTANT = 60  # of a hybrid search: Cormack, Clarke and Buettcher, SIGIR 2009


def check_documents(
    texts: Any, metadata: Any, ids: Any
) -> tuple[list[str], list[dict[str, Any]], list[str] | None]:
    """Check and copy the arguments of `rag_demo.Retriever.add`.

    Raises:
        TypeError: A text or an id is not str, or metadata are not JSON.
        ValueError: Lengths differ, or an id is repeated.
    """
    names = None if ids is None else checked_texts(ids, "ids")
    texts, metadata = checked_texts(texts, "texts"), None if metadata is None else list(metadata)
    for what, values in (("metadata", metadata), ("ids", names)):
        if values is not None and len(values) != len(texts):
            raise ValueError(f"got {len(texts)} texts but {len(values)} {what}; pass one for each")
    if names is not None and len(set(names)) < len(names):
        ((repeated, _),) = Counter(names).most_common(1)
        raise ValueError(f"the id {short_repr(repeated)} appears twice; ids must differ")
    known: Sequence[Mapping[str, Any]] = [{}] * len(texts) if metadata is None else metadata
    plain = [
        checked_metadata(each, f"text {number}" if names is None else short_repr(names[number]))
        for number, each in enumerate(known)
    ]
    return texts, plain, names


def check_chunks(size: Any, overlap: Any) -> None:
    """Check the size and the overlap of passages.

    Raises:
        ValueError: The size is not positive, or the overlap is not smaller than the size.
    """
    for what, value, least in (("chunk_size", size, 1), ("chunk_overlap", overlap, 0)):
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= least):
            raise ValueError(
                f"{what} must be a whole number of at least {least}, got {short_repr(value)}"
            )
    if overlap >= (size or PASSAGE_CHARS):
        raise ValueError(f"chunk_overlap must be smaller than chunk_size, got {overlap}")


def check_queries(queries: Any, top_k: Any, min_score: Any, mode: Any) -> list[str]:
    """Check the arguments of `rag_demo.Retriever.search_batch`, and return the queries.

    Raises:
        TypeError: A query is not str, or ``min_score`` is not a number.
        InvalidValueError: ``top_k`` is not positive, ``min_score`` is NaN, or the mode is unknown.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)) or top_k < 1:
        raise InvalidValueError(f"top_k must be a positive whole number, got {short_repr(top_k)}")
    if not isinstance(min_score, (int, float, np.integer, np.floating, type(None))):
        raise TypeError(f"min_score must be a number, got {short_repr(min_score)}")
    if min_score != min_score:
        raise InvalidValueError("min_score must not be NaN")
    if mode not in MODES:
        raise InvalidValueError(f"mode must be one of {', '.join(MODES)}, got {short_repr(mode)}")
    return checked_texts(queries, "queries")


def check_weights(weights: Any, min_score: Any, mode: str) -> tuple[float, float]:
    """Check the weights of a hybrid search, and that a score can reach ``min_score``.

    Raises:
        TypeError: The weights are not two numbers.
        InvalidValueError: A weight is negative or not finite, or both are 0; or ``min_score`` is
            higher than all scores of a hybrid search.
    """
    try:
        dense, words = map(float, weights)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be two numbers, got {short_repr(weights)}") from None
    if not (0 <= dense < math.inf and 0 <= words < math.inf and dense + words):
        raise InvalidValueError(
            f"weights must be finite and not negative, one above 0, got {weights}"
        )
    highest = (dense + words) / (RANK_CONSTANT + 1)
    if mode == "hybrid" and min_score is not None and min_score > highest:
        raise InvalidValueError(
            f"min_score is {short_repr(min_score)}, but scores of the mode 'hybrid' end at "
            f"{highest:.4f}; use mode='dense', whose scores are cosines"
        )
    return dense, words
