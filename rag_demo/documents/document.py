"""Documents: what is indexed and found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rag_demo.documents.metadata import checked_metadata
from rag_demo.errors import short_repr

__all__ = ["Document", "checked_document"]


class Document(NamedTuple):
    """One text to index.

    Attributes:
        id: Its name in the index.
        text: What is embedded and found.
        metadata: What is known about it: JSON values, to filter by and to get back.
        file: The full path of the file that it was read from, if it was; not what metadata say.
    """

    id: str
    text: str
    metadata: Mapping[str, Any]
    file: str | None = None


def checked_document(document: object) -> Document:
    """Check what a program hands over as a document; its metadata are copied.

    Raises:
        TypeError: It is none, its id or its text is no text, or its metadata are not JSON.
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
