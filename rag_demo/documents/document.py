"""Documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rag_demo.documents.metadata import checked_metadata
from rag_demo.errors import short_repr


class Document(NamedTuple):
    """One text to index.

    Attributes:
        id: The id in the index.
        text: The text to embed and to find.
        metadata: JSON values. Filters compare them, and results contain them.
        file: The full path of the file that it was read from, or None.
    """

    id: str
    text: str
    metadata: Mapping[str, Any]
    file: str | None = None


def checked_document(document: object) -> Document:
    """Check a caller's document, and return it with a copy of its metadata.

    Raises:
        TypeError: It is not a Document, its id or text is not str, or its metadata are not JSON.
        ValueError: See `rag_demo.documents.metadata.checked_metadata`.
    """
    if not isinstance(document, Document):
        raise TypeError(f"{short_repr(document)} is not a Document")
    for what in ("id", "text"):
        if not isinstance(getattr(document, what), str):
            raise TypeError(f"the {what} of {short_repr(document)} must be str")
    if not isinstance(document.file, (str, type(None))):
        raise TypeError(f"the file of {short_repr(document)} must be str or None")
    return document._replace(metadata=checked_metadata(document.metadata, short_repr(document.id)))
