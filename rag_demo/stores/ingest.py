"""Ingestion: stream documents into a saved index, and embed only new and changed ones.

So an interrupted run can continue, and a changed folder can be indexed again cheaply.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_demo.documents.document import Document, checked_document
from rag_demo.encoding.embedder import BasicEmbedder, as_embedder
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    DamagedIndexError,
    IndexChangedError,
    IndexFileError,
    ModelError,
    OtherIndexError,
)
from rag_demo.stores.embed import embed
from rag_demo.stores.index_folder import read_manifest
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.stores.words import check_language
from rag_demo.stores.writer import IndexWriter
from torch_utils import exit_on_signals

if TYPE_CHECKING:
    from rag_demo.stores.postgres import PostgresUrl

__all__ = ["Ingested", "exit_on_sigterm", "ingest"]

COMMIT_S = 2.0  # about the time between two commits
_FEWEST, _MOST = 32, 1024  # documents of a commit
_CHECKED_BYTES = 1 << 26  # of vectors that every change checks
_MOST_CHARS = 1 << 21  # of a commit; the last document may exceed it


@dataclass(frozen=True)
class Ingested:
    """The result of an ingestion.

    Attributes:
        embedded: How many documents were embedded.
        reused: How many documents the index already had.
    """

    embedded: int
    reused: int


def ingest(
    documents: Iterable[Document],
    embedding_model: BasicEmbedder,
    folder: str | Path | PostgresUrl,
    *,
    source: str | None = None,
    replace: bool = False,
    covers_all: bool = True,
    files: Callable[[], Collection[str]] | None = None,
    based_on: str | None = None,
    language: str | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Ingested:
    """Index documents into a folder.

    About every two seconds, the embedded documents are committed and can be searched. So Ctrl-C,
    an error, SIGTERM or SIGKILL loses at most that much work. In the main thread, an unhandled
    SIGTERM becomes a SystemExit. Documents of an earlier index stay until a run has finished; those
    of a damaged index, or of another model with ``replace``, go with the first commit.

    Args:
        documents: The documents. Their ids must differ; each id takes about 100 bytes of memory.
        embedding_model: The embedding model. It embeds new and changed documents only.
        folder: The folder of the index, or its URL in a database.
        source: A description of the source, which is stored in the index.
        replace: Whether to replace an index of another source or another model.
        covers_all: Whether ``documents`` are all that the index should hold. Only then a damaged
            index of the same source is made again.
        files: Returns, at the end, the files whose other documents are removed; by default all
            other documents are.
        based_on: The ``commit`` of the manifest that the documents were chosen for; None for any.
        language: The language of stems in the full text, such as "german"; by default that of the
            index, or "english".
        on_progress: Called with the number of documents processed since the last call.

    Returns:
        How many documents were embedded and reused.

    Raises:
        ModelError: The model returned vectors that are zero, not finite, or too few.
        OtherIndexError: The folder holds an index of another source or another model. Nothing
            was embedded.
        IndexChangedError: The index is not the one of ``based_on``.
        DamagedIndexError: The index is damaged, and may hold other documents than these.
        IndexFileError: The folder holds something else, another process is writing into it, or
            it cannot be written; or a document is invalid or its id is repeated. The index stays
            as it was after the last commit.
    """
    check_language(language or "none")
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        writer = stack.enter_context(
            _open_writer(folder, source, replace=replace, covers_all=covers_all)
        )
        known = writer.manifest
        if based_on is not None and getattr(known, "commit", None) != based_on:
            raise IndexChangedError(f"another program has changed '{folder}' meanwhile; run again")
        has_source = known is not None and bool(known.rows or known.source)
        if has_source and not replace and known.source != source:
            other = known.source
            what = f"the index of {other}" if other else "an index that a program made"
            raise _other(folder, f"{what}, not of {source or 'documents from a program'}")
        _use_model(writer, as_embedder(embedding_model).identity, replace=replace)
        if language is not None:
            writer.use_language(language)
        run = stack.enter_context(closing(_Run(writer, embedding_model, source, on_progress)))
        for batch in _batches(documents):
            run.take(batch)
        run.finish(files)
        return Ingested(run.embedded, run.reused)


def _open_writer(
    folder: str | Path | PostgresUrl, source: str | None, *, replace: bool, covers_all: bool
) -> Any:
    """Open an index for changes; empty a damaged one only if ``documents`` make it again."""
    if not isinstance(folder, (str, Path)):
        from rag_demo.stores.postgres import PostgresStore

        return PostgresStore(folder)
    folder = Path(folder)
    may_start_over = covers_all and (replace or _source_of(folder) == source)
    writer = IndexWriter(folder, start_over=may_start_over)
    try:
        manifest = writer.manifest
        is_small = manifest and 4 * manifest.rows * manifest.dimension <= _CHECKED_BYTES
        if manifest is not None and (covers_all or is_small):
            try:
                writer.check()
            except DamagedIndexError:
                if not may_start_over:
                    raise
                writer.clear(manifest.model, source=manifest.source)
    except BaseException:  # After an interrupt too, nothing else closes the writer.
        writer.__exit__()
        raise
    return writer


def _source_of(folder: Path) -> object:
    """Return the source of an index, or an object that equals no source."""
    try:
        return read_manifest(folder).source
    except IndexFileError:
        return object()


def exit_on_sigterm() -> AbstractContextManager[object]:
    """Make SIGTERM raise SystemExit, if the program does not handle it."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        return exit_on_signals(signal.SIGTERM)
    return nullcontext()


def _use_model(writer: Any, model: ModelIdentity, *, replace: bool) -> None:
    manifest = writer.manifest
    if manifest is None or manifest.model is None or not manifest.model.is_same(model):
        if manifest is not None and manifest.rows and not replace:
            raise _other(writer.folder, f"vectors of the model {manifest.model}, not of {model}")
        writer.clear(model)


def _other(folder: object, what: str) -> OtherIndexError:
    return OtherIndexError(f"'{folder}' holds {what}; name another folder, or replace the index")


class _Run:
    """One run of an ingestion: read, embed, write."""

    def __init__(
        self,
        writer: Any,
        model: BasicEmbedder,
        source: str | None,
        on_progress: Callable[[int], object],
    ) -> None:
        self.embedded = self.reused = 0
        self._writer, self._model, self._source = writer, model, source
        self._on_progress = on_progress
        self._ids: set[str] = set()
        self._waiting: deque[tuple[int, list[Document], Future[EmbeddedBatch] | None]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def take(self, batch: list[Document]) -> None:
        """Index a batch of documents, and commit it."""
        writer = self._writer
        for document in batch:
            if document.id in self._ids:
                raise IndexFileError(f"the id {document.id!r} appears twice; ids must differ")
            self._ids.add(document.id)
        new, changed = [], []
        pairs = zip(batch, writer.get([document.id for document in batch]), strict=True)
        for document, before in pairs:
            if before is None or _embedded(before) != _embedded(document):
                new.append(document)
            elif _described(before) != _described(document):
                changed.append(document)
        if changed:
            writer.upsert(EmbeddedBatch.without_vectors(changed))
        ahead = getattr(self._model, "in_flight", 0) if new else 0
        if ahead and self._threads is None:
            self._threads = ThreadPoolExecutor(ahead)
        submitted = (
            self._threads.submit(embed, new, self._model) if ahead and self._threads else None
        )
        self._waiting.append((len(batch), new, submitted))
        self.write(ahead)

    def write(self, ahead: int = 0) -> None:
        """Write and commit what was embedded, but leave so many batches in flight."""
        while len(self._waiting) > ahead:
            count, new, submitted = self._waiting.popleft()
            if new:
                try:
                    embedded = submitted.result() if submitted else embed(new, self._model)
                except ValueError as error:
                    raise ModelError(f"the documents cannot be embedded: {error}") from error
                self._writer.upsert(embedded)
            self.reused += count - len(new)
            self.embedded += len(new)
            self._writer.keep(self._source, finished=False)
            self._on_progress(count)

    def finish(self, files: Callable[[], Collection[str]] | None) -> None:
        """Remove documents that the source no longer has, and commit."""
        self.write()
        others = self._writer.of_files(None if files is None else list(files()))
        self._writer.delete([name for name in others if name not in self._ids])
        self._writer.keep(self._source, finished=True)

    def close(self) -> None:
        """Wait for nothing that is still in flight."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _embedded(document: Document) -> tuple[str, object]:
    """Return what the vectors of a document depend on."""
    return document.text, document.metadata.get("title")


def _described(document: Document) -> tuple[str | None, str]:
    """Return the parts that can change without embedding. As text, 1 and True differ."""
    return document.file, json.dumps(document.metadata)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield batches of documents that take about `COMMIT_S` each."""
    iterator, size = iter(documents), _FEWEST
    while batch := list(_until_full(iterator, size)):
        started_s = time.monotonic()
        yield batch
        taken_s = time.monotonic() - started_s
        if taken_s < COMMIT_S / 2:
            size = min(2 * size, _MOST)
        elif taken_s > 2 * COMMIT_S:
            size = max(size // 2, 1)


def _until_full(documents: Iterator[Document], size: int) -> Iterator[Document]:
    chars = 0
    for each in documents:
        try:
            document = checked_document(each)
        except (TypeError, ValueError) as error:
            raise IndexFileError(f"a document cannot be indexed: {error}") from None
        yield document
        size -= 1
        chars += len(document.text)
        if not size or chars >= _MOST_CHARS:
            return
