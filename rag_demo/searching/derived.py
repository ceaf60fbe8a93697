"""What is computed of an index when it is saved, so that opening it costs nothing."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from rag_demo.documents.document import Documents, DocumentSource
from rag_demo.documents.rows import DocumentRows
from rag_demo.searching.collection import Collection
from rag_demo.searching.tensor_vectors import TensorVectors
from rag_demo.searching.vector_store import SavedVectors
from rag_demo.vectors import Vectors

__all__ = ["derived_arrays"]


def derived_arrays(
    vectors: Vectors, documents: DocumentSource, rows: DocumentRows
) -> dict[str, npt.NDArray[Any]]:
    """Compute what a retriever would have to compute when it opens the index.

    Takes some milliseconds for a hundred documents, most of it for their words; and in memory
    some hundred bytes for each document.

    Args:
        vectors: Shape (n, d); mapped ones stay where they are.
        documents: What they are of, read one by one, several times.
        rows: Which vectors belong to each of them.

    Returns:
        Arrays for `rag_demo.index.write_index`, three tenths of the index's size at most.
    """
    if not len(vectors):
        return {}
    saved = SavedVectors(vectors, None, _nothing, _nothing)
    return Collection(TensorVectors().opened(saved), Documents(documents), rows).derived()


def _nothing() -> None:
    """There is nothing to check: nobody has read this from a file."""
