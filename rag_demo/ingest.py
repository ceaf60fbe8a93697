"""Ingestion: documents into a saved index, streamed, continued, and only as far as needed.

What the index in the folder has already is taken from there when it is the same: that is how an
interrupted run goes on, and how a folder is indexed again after changes.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rag_demo.documents.document import Document, checked_document
from rag_demo.encoding.embedder import BasicEmbedder, completed
from rag_demo.errors import IndexFileError
from rag_demo.index import refuse_foreign_folder, refuse_other_index
from rag_demo.index_builder import IndexBuilder
from rag_demo.storage.manifest import SPOOL
from rag_demo.storage.writing import made_and_locked
from torch_utils import exit_on_signals

__all__ = ["Ingested", "ingest", "sigterm_ends_in_order"]

BATCH = 2048  # documents in memory at once
BATCH_CHARS = 1 << 21  # about 2,500 passages; a batch ends with the document that reaches it
CHECKPOINT_S = 60.0  # between two saves of an unfinished index


@dataclass(frozen=True)
class Ingested:
    """What an ingestion did.

    Attributes:
        embedded: Documents that were embedded.
        reused: Documents whose vectors the index had already.
        finished: Whether all documents were seen.
    """

    embedded: int
    reused: int
    finished: bool


def ingest(
    documents: Iterable[Document],
    embedding_model: BasicEmbedder,
    folder: Path,
    *,
    source: str | None = None,
    replace: bool = False,
    on_progress: Callable[[int], object] = lambda count: None,
    checkpoint_s: float = CHECKPOINT_S,
) -> Ingested:
    """Index documents into a folder.

    Holds `BATCH` documents and their vectors in memory, and what finding earlier ones takes:
    about 200 bytes for each. The index is saved every ``checkpoint_s`` seconds, within a long
    document too, so a killed run loses no more than that. Whatever ends a run saves as well:
    Ctrl-C, an error, and SIGTERM where this is called in the main thread and the program does
    not handle that itself; it then ends by SystemExit. What an earlier index had and was not
    reached yet stays in it until a run is finished.

    Args:
        documents: What to index; ids must differ.
        embedding_model: What makes vectors; called only for texts that are new or have changed.
        folder: Of the index.
        source: Says what the documents are of. The index remembers it.
        replace: Replace an index that is not an earlier one of this source and this model.
        on_progress: Called with the count of documents that were dealt with since last time.
        checkpoint_s: See above, seconds.

    Raises:
        OtherIndexError: The folder holds an index of another source, of another model, or of a
            newer version. Nothing was embedded.
        IndexFileError: The folder holds something else, is being written by another process, or
            cannot be written (the index stays what it was at the last save); or an id stands
            twice, an id or a text is no text, or metadata are not JSON.
    """
    refuse_foreign_folder(folder)
    if not replace:
        refuse_other_index(folder, source=source)  # Before a model is loaded in vain.
    with made_and_locked(folder), sigterm_ends_in_order():
        embedder = completed(embedding_model)
        if not replace:
            refuse_other_index(folder, model=embedder.identity, source=source)
        _remove_spools(folder)
        with IndexBuilder(embedder, folder, source) as builder:
            finished = _take_all(builder, documents, on_progress, checkpoint_s)
            if not finished and builder.has_news:
                builder.save(finished=False)
        return Ingested(builder.embedded, builder.reused, finished)


def _take_all(
    builder: IndexBuilder,
    documents: Iterable[Document],
    on_progress: Callable[[int], object],
    checkpoint_s: float,
) -> bool:
    """Take batch by batch, and save all; return False after a Ctrl-C."""
    saved_s = time.monotonic()

    def checkpoint() -> None:
        nonlocal saved_s
        if time.monotonic() - saved_s > checkpoint_s:
            builder.save(finished=False)
            saved_s = time.monotonic()

    try:
        for batch in _batches(documents):
            builder.take(batch, on_progress, checkpoint)
            checkpoint()
        # What is computed for the last save takes long: an end to that is an end like any other.
        builder.save(finished=True)
    except KeyboardInterrupt:
        return False  # What was done is saved; the caller is told by the result.
    except BaseException as error:
        # SystemExit by SIGTERM, a source that cannot be read, a full disk: it is the caller's,
        # and what was done is saved.
        if builder.has_news:
            try:
                builder.save(finished=False)
            except IndexFileError as unsaved:
                if not isinstance(error, IndexFileError):
                    raise unsaved from error
        raise
    return True


def sigterm_ends_in_order() -> AbstractContextManager[object]:
    """Make SIGTERM raise SystemExit, where it would end the process on the spot."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        return exit_on_signals(signal.SIGTERM)
    return nullcontext()


def _remove_spools(folder: Path) -> None:
    """Remove what a killed run of an earlier version has left behind."""
    for left in folder.glob(f"{SPOOL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(_until_full(itertools.islice(iterator, BATCH))):
        yield batch


def _until_full(documents: Iterator[Document]) -> Iterator[Document]:
    chars = 0
    for each in documents:
        try:
            document = checked_document(each)
        except (TypeError, ValueError) as error:
            raise IndexFileError(f"what was handed over cannot be indexed: {error}") from None
        yield document
        chars += len(document.text)
        if chars >= BATCH_CHARS:
            return
