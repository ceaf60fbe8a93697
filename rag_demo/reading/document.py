"""Documents. Their metadata are plain JSON, checked and copied when they go in."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rag_demo.errors import short_repr

_MOST_DEPTH = 100  # of nested lists and mappings; every JSON reader accepts that many


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


def checked_metadata(metadata: object, where: str) -> dict[str, Any]:
    """Return a deep copy of metadata.

    Args:
        metadata: A mapping of JSON values. Scalars of numpy become Python's, and dates become text
            as in ISO 8601.
        where: The document they belong to, for the error message.

    Raises:
        TypeError: They are not a mapping with str as keys, or a value is not JSON.
        ValueError: A number is not finite or too long, or the nesting is too deep.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of {where} must be a mapping, got {short_repr(metadata)}")
    if not metadata:
        return {}
    try:
        depth = _checked_depth(metadata)
        text = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False, default=plain_scalar)
        plain: dict[str, Any] = json.loads(text.encode())  # Lone surrogates are refused.
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the metadata of {where} are not JSON: {error}") from None
    if depth > _MOST_DEPTH:
        raise ValueError(f"the metadata of {where} are nested more than {_MOST_DEPTH} deep")
    return plain


def _checked_depth(value: Any) -> int:
    """Return how deep a value is nested; json.dumps could make two keys one, so they are str."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"keys must be str, got {short_repr(value)}")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return 1 + max(map(_checked_depth, value), default=0)


def plain_scalar(value: Any) -> Any:
    """Return the JSON value of a scalar of numpy, a date or a time.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, (np.bool_, np.number)):
        return value.item()
    raise TypeError(f"{type(value).__name__} {short_repr(value)} is not a JSON value")
