"""Places of an index: a folder, or tables of a database. Commands and the service open them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import rag_demo  # Its names are imported when they are used.
from rag_demo.encoding.model_identity import ModelIdentity

if TYPE_CHECKING:
    from rag_demo.stores.index_folder import Manifest


def as_place(value: Any) -> Any:
    """Return the path of a folder, or the `rag_demo.stores.postgres.PostgresUrl` of a database."""
    if not str(value).startswith(("postgresql://", "postgres://")):
        return Path(value)
    from rag_demo.stores.postgres import PostgresUrl

    return PostgresUrl.parse(value)


def open_store(place: Any) -> Any:
    """Open the store of an index, which the caller must close. A folder's store is a snapshot."""
    if not isinstance(place, Path):
        from rag_demo.stores.postgres import PostgresStore

        return PostgresStore(place, create=False)
    from rag_demo.stores.local import LocalStore
    from rag_demo.stores.tensor_vectors import TensorVectors

    store = LocalStore(TensorVectors("cpu", "float32", None))
    store.load(place)
    return store


def load_manifest(place: Any) -> Manifest:
    """Read the manifest of an index, before a model is loaded in vain.

    Raises:
        RagDemoError: The index is missing or damaged, or the database cannot be reached.
    """
    from rag_demo.stores.index_folder import read_manifest

    if isinstance(place, Path):
        return read_manifest(place)
    with closing(open_store(place)) as store:
        return cast("Manifest", store.manifest)


def open_indexes(
    places: Sequence[Any],
    embedder: Any,
    stack: ExitStack,
    kind: str = "torch",
    device: str | None = None,
    *,
    check: bool = False,
) -> Any:
    """Open one or several indexes as one retriever, which an `ExitStack` closes.

    Args:
        places: See `as_place`. A database has its own kind of retriever.
        embedder: The embedding model, or only the identity of one. Searches then need vectors.
        stack: Closes what was opened, after an error too.
        kind: The retriever of a folder: "torch" or "faiss".
        device: The device of the kind "torch".
        check: See `rag_demo.retriever.LocalRetriever.load`.
    """
    if isinstance(embedder, ModelIdentity):
        embedder = SimpleNamespace(
            identity=embedder, dimension=None, embed_query=None, embed_documents=None
        )
    opened: list[Any] = []
    for place in places:
        if not isinstance(place, Path):
            new: Any = rag_demo.PgVectorRetriever(embedder, place.conninfo, place.table)
        elif kind == "faiss":
            new = rag_demo.FaissRetriever(embedder)
        else:
            new = rag_demo.PyTorchGPURetriever(embedder, device=device)
        opened.append(stack.enter_context(new))
        if isinstance(place, Path):
            new.load(place, check=check)
    return opened[0] if len(opened) == 1 else stack.enter_context(rag_demo.ShardedRetriever(opened))
