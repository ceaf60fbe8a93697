"""Documents in JSON lines: each line is an object with a text and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from rag_demo.documents.document import Document
from rag_demo.documents.files import MOST_BYTES, TOO_LARGE, Skip, UnreadableError
from rag_demo.documents.metadata import checked_metadata
from rag_demo.errors import short_repr


def read_json_lines(
    file: IO[bytes], name: str, skip: Skip, text_field: str = "text", prefix: str = ""
) -> Iterator[Document]:
    """Yield the documents of lines, which are read one by one.

    Args:
        file: The lines.
        name: The name of the file, for the metadata's ``source``. A line without an id has the id
            "NAME#NUMBER".
        skip: Called for a line that is not a document.
        text_field: The field with the text. ``title`` is put before the text. ``id`` or ``_id``,
            a string or a number, is the document's id. All other fields are metadata.
        prefix: The beginning of the other ids.

    Raises:
        UnreadableError: A line has more than `MOST_BYTES`.
    """
    seen: set[str] = set()
    for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
        if len(line) > MOST_BYTES:
            raise UnreadableError(f"with a line {TOO_LARGE}")
        if not line.strip():
            continue
        try:
            document = _document(line, number, text_field, name, prefix)
            if document.id in seen:
                raise ValueError(f"the id {document.id!r} appears twice")
        except ValueError as error:
            skip(f"{name}:{number}", "not a document", error)
        else:
            seen.add(document.id)
            yield document


def _document(line: bytes, number: int, text_field: str, name: str, prefix: str) -> Document:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        is_object = isinstance(record, dict)
        found = f"the fields {', '.join(record)}" if is_object else type(record).__name__
        raise ValueError(
            f'expected an object with a string "{text_field}", got {short_repr(found)}; '
            "name the field with the text: --text-field"
        )
    keys = [record.pop(name, None) for name in ("id", "_id")]
    key = next((each for each in keys if each is not None), None)
    if isinstance(key, (bool, list, dict)):
        raise ValueError(f"the id must be a string or a number, got {json.dumps(key)[:50]}")
    title, text = record.get("title"), record.pop(text_field)
    record.setdefault("source", f"{name}:{number}")
    if isinstance(title, str) and title:
        text = f"{title}\n{text}"
    name = f"{name}#{number}" if key is None else f"{prefix}{key}"
    return Document(
        name, text, checked_metadata({"line": number, **record}, f"the id {short_repr(name)}")
    )
