"""Places of an index: a folder, or tables of a database. Commands and the service open them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import rag_demo  # Its names are imported when they are used.
from rag_demo.encoding.model_identity import ModelIdentity

if TYPE_CHECKING:
    from rag_demo.stores.index_folder import Manifest


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


def open_index(
    place: Any,
    embedder: Any,
    stack: ExitStack,
    kind: str = "torch",
    device: str | None = None,
    *,
    check: bool = False,
) -> Any:
    """Open the retriever of an index, which an `ExitStack` closes.

    Args:
        place: See `rag_demo.stores.address.as_place`. A database has its own kind of retriever.
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
    if not isinstance(place, Path):
        opened = rag_demo.PgVectorRetriever(embedder, place.conninfo, place.table)
        return stack.enter_context(opened)
    if kind == "faiss":
        local: Any = rag_demo.FaissRetriever(embedder)
    else:
        local = rag_demo.PyTorchGPURetriever(embedder, device=device)
    stack.enter_context(local).load(place, check=check)
    return local
