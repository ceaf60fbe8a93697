"""Index: the index of a service, which clients and other processes change while it is searched."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import IndexChangedError, PostgresError, WriterBusyError
from rag_demo.open_index import load_manifest, open_index
from rag_demo.service import metrics
from rag_demo.service.logs import log_error
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Settings
from torch_utils import ModelHost

log = logging.getLogger("rag_demo.service")
_FRESH_S = 0.5  # A search waits so long for a new version, then it uses the old one.
_PAUSE_S = 0.2  # between two attempts to change the index


class Index:
    """The index of a service. Belongs to one event loop; threads search it.

    Args:
        settings: The service's settings.
        identity: The model that made the index.

    Attributes:
        host: Opens the index when it is used.
        documents: How many documents the index has.
        version: A name for its state.
        nbytes: Bytes of the vectors and of mapped files when it was opened; 0 for a database.
        is_database: Whether it is in a database, which is its own state.

    Raises:
        RagDemoError: There is no index, or it is damaged.
    """

    def __init__(self, settings: Settings, identity: ModelIdentity) -> None:
        self._settings, self._identity = settings, identity
        self.is_database = not isinstance(settings.index, Path)
        self.nbytes = 0
        self.set_state(*self.look())
        self._stamp = self._read_stamp()
        # The index is mapped from its files, so an idle index costs little.
        self.host = ModelHost(self._open, name="index", keep_alive=-1)
        self._loop, self._changing = asyncio.get_running_loop(), asyncio.Lock()

    # Its state

    def look(self) -> tuple[int, str]:
        """Read the number of documents and the version from the folder or the database."""
        manifest = load_manifest(self._settings.index)
        return manifest.count, manifest.commit

    def set_state(self, documents: int, version: str) -> None:
        """Name the version in use."""
        self.documents, self.version = documents, version
        metrics.DOCUMENTS.set(documents)
        metrics.INDEX_VERSION.clear()
        metrics.INDEX_VERSION.labels(version).set(1)

    def _read_stamp(self) -> list[Any]:
        """Return what differs after another process has changed the folder. Costs a few stats."""
        found: list[Any] = []
        if self.is_database:
            return found
        # The folder or a file may be missing for a moment; that is a change too.
        with contextlib.suppress(OSError), os.scandir(self._settings.index) as entries:
            for entry in entries:
                status = entry.stat()
                found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return sorted(found)

    # Opening and saving, in threads

    def _open(self) -> Any:
        settings = self._settings
        with contextlib.ExitStack() as stack:
            state = self.look()  # Before: the folder may change meanwhile.
            kind, device = settings.retriever, settings.device
            retriever = open_index(settings.index, self._identity, stack, kind, device, check=True)
            self.nbytes = 0 if self.is_database else retriever.stats().nbytes
            self.set_state(*state)
            stack.pop_all()
        return retriever

    def _save(self, change: Callable[[Any], Any], retriever: Any) -> Any:
        if result := change(retriever):  # Otherwise nothing was deleted.
            if self.is_database:
                self.set_state(*self.look())
            else:
                version = retriever.store.save(self._settings.index, self._identity)
                self.set_state(len(retriever), version)
        return result

    # Jobs of its lane, in the lane's thread

    def search(
        self, options: dict[str, Any], retriever: Any, inputs: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        """Return the results of queries with vectors; the mode bm25 needs no vectors."""
        queries, vectors = zip(*inputs, strict=True)
        known = None if options["mode"] == "bm25" else np.stack(vectors)
        found: list[Any] = retriever.search_batch(queries, **options, vectors=known)
        return found

    def get(self, retriever: Any, ids: Sequence[str]) -> list[Any]:
        """Return the document of each id, or None."""
        found: list[Any] = retriever.get(ids)
        return found

    def page(self, retriever: Any, inputs: Sequence[tuple[int, str | None]]) -> list[Any]:
        """Return a page of documents for each limit and last id."""
        return [retriever.documents(after=after, limit=limit) for limit, after in inputs]

    def refresh(self) -> None:
        """Open a new version of the index that another process has written, before a batch.

        A version that cannot be opened is tried again after the next change. During a change of
        the service itself, searches do not wait for it.
        """
        if self._changing.locked():
            return
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            opening = asyncio.run_coroutine_threadsafe(self.reload(is_forced=False), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError, Problem):
                opening.result(_FRESH_S)

    # Changes

    async def reload(self, *, is_forced: bool = True) -> None:
        """Open the index again. The old one answers until the new one is open.

        Args:
            is_forced: Whether to open it if it is the version in use, too.

        Raises:
            Problem: The new index cannot be opened; the old one stays in use.
        """
        async with self._changing:
            try:
                # The version in use is a change of the service itself.
                if is_forced or (await asyncio.to_thread(self.look))[1] != self.version:
                    await self.host.areplace(self._open)
                    log.info("opened the index again: %d documents", self.documents)
            except Exception as error:  # After any error of the new index the old one still works.
                log_error("reload failed, the old index stays in use", error)
                reason = public_reason(error)
                raise Problem(409, f"{reason}; the old index is still in use") from None

    async def change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        """Change the index and save it. Searches continue meanwhile.

        Args:
            change: Changes the retriever. It is called again while another process changes it too.
            deadline: When to give up, in seconds of the event loop's clock.

        Returns:
            The result of ``change``.

        Raises:
            Problem: The index cannot be changed or saved; the old index stays in use.
        """
        async with self._changing:
            while self._loop.time() < deadline:
                try:
                    return await self.host.call(partial(self._save, change))
                except PostgresError:  # A transaction was rolled back.
                    raise
                except (TypeError, ValueError) as error:  # The client's documents are invalid.
                    raise Problem(422, str(error)[:500], param="documents") from None
                except Exception as error:  # From the disk, or another process is changing it.
                    await self.host.areplace(self._open)  # It must match its files again.
                    if not isinstance(error, (IndexChangedError, WriterBusyError)):
                        log_error("the index cannot be changed", error)
                        detail = "the index cannot be changed now; the service's log says why"
                        raise overloaded(60, detail, status=503) from None  # As by a full disk.
                await asyncio.sleep(_PAUSE_S)
            raise overloaded(5, "other changes of the index take all the time", status=503)
