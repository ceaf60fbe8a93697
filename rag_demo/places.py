"""Places of an index: a folder, or tables of a database. Commands and the service open them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rag_demo  # Its names are imported when they are used.

if TYPE_CHECKING:
    from rag_demo.stores.index_folder import Manifest


def as_place(value: Any) -> Any:
    """Return the path of a folder, or the `rag_demo.stores.postgres.PostgresUrl` of a database."""
    if not str(value).startswith(("postgresql://", "postgres://")):
        return Path(value)
    from rag_demo.stores.postgres import PostgresUrl

    return PostgresUrl.parse(value)


def open_database(url: Any) -> Any:
    """Open the store of an index in a database, which the caller must close."""
    from rag_demo.stores.postgres import PostgresStore

    return PostgresStore(url, create=False)


def load_manifest(place: Any) -> Manifest:
    """Read the manifest of an index, before a model is loaded in vain.

    Raises:
        RagDemoError: The index is missing or damaged, or the database cannot be reached.
    """
    from rag_demo.stores.index_folder import read_manifest

    if isinstance(place, Path):
        return read_manifest(place)
    with open_database(place) as store:
        manifest: Manifest = store.manifest
        return manifest


def make_retriever(kind: str, embedder: Any, device: str | None = None) -> Any:
    """Create an empty retriever of the kind "torch" or "faiss"."""
    if kind == "faiss":
        return rag_demo.FaissRetriever(embedder)
    return rag_demo.PyTorchGPURetriever(embedder, device=device)


def open_indexes(
    places: Sequence[Any],
    embedder: Any,
    make: Callable[[], Any],
    stack: ExitStack,
    *,
    check: bool = False,
) -> Any:
    """Open one or several indexes as one retriever, which an `ExitStack` closes.

    Args:
        places: See `as_place`. A database has its own kind of retriever.
        embedder: The embedding model.
        make: Creates an empty retriever for a folder, such as `make_retriever`.
        stack: Closes what was opened, after an error too.
        check: See `rag_demo.retriever.LocalRetriever.load`.
    """
    opened: list[Any] = []
    for place in places:
        if isinstance(place, Path):
            opened.append(stack.enter_context(make()))
            opened[-1].load(place, check=check)
        else:
            retriever = rag_demo.PgVectorRetriever(embedder, place.conninfo, place.table)
            opened.append(stack.enter_context(retriever))
    return opened[0] if len(opened) == 1 else stack.enter_context(rag_demo.ShardedRetriever(opened))
