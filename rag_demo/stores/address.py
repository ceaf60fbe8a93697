"""The address of an index: a folder, or tables of a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def as_place(value: Any) -> Any:
    """Return the path of a folder, or the `rag_demo.stores.postgres.PostgresUrl` of a database.

    Anything but a str is returned as it is.
    """
    if not isinstance(value, str):
        return value
    if "://" not in value:
        return Path(value)
    from rag_demo.stores.postgres import PostgresUrl

    return PostgresUrl.parse(value)
