"""Ingestion: documents into a saved index, streamed, continued, and only as far as needed.

What the index in the folder has already is taken from there when its text is the same: that is
how an interrupted run goes on, and how a folder is indexed again after changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from rag_demo.corpus import Document
from rag_demo.documents.document import Record, dump_record, parse_record
from rag_demo.documents.rows import DocumentProgress, Parts, split
from rag_demo.errors import IndexFileError, ModelMismatchError
from rag_demo.index import SPOOL, SavedIndex, read_index, refuse_foreign_folder, replace_index
from rag_demo.retriever import Embedder, model_name
from rag_demo.storage.mapped_file import lock
from rag_demo.vectors import Rows, Vectors, normalized

__all__ = ["Ingested", "ingest"]

BATCH = 2048  # documents in memory at once
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
    embedder: Embedder,
    folder: Path,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    checkpoint_s: float = CHECKPOINT_S,
) -> Ingested:
    """Index documents into a folder.

    Holds `BATCH` documents and their vectors in memory, and what finding earlier ones takes:
    about 200 bytes for each. The index is saved every ``checkpoint_s`` seconds, so a killed run
    loses no more than that. Ctrl-C saves as well; what an earlier index had and was not reached
    yet stays in it until a run is finished.

    Args:
        documents: What to index; ids must differ.
        embedder: What makes vectors; called only for texts that are new or have changed.
        folder: Of the index.
        on_progress: Called with the count of documents that were dealt with since last time.
        checkpoint_s: See above, seconds.

    Raises:
        IndexFileError: The folder holds something else, or is being written by another process.
    """
    refuse_foreign_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        _remove_spools(folder)
        return _ingest(documents, embedder, folder, on_progress, checkpoint_s)


def _remove_spools(folder: Path) -> None:
    """Remove what a killed run has left behind."""
    for left in folder.glob(f"{SPOOL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _ingest(
    documents: Iterable[Document],
    embedder: Embedder,
    folder: Path,
    on_progress: Callable[[int], object],
    checkpoint_s: float,
) -> Ingested:
    with tempfile.TemporaryDirectory(prefix=SPOOL, dir=folder) as spool:
        work = _Ingestion(embedder, folder, _Earlier.open(folder, embedder), Path(spool))
        with contextlib.closing(work):
            finished = False
            try:
                saved_s = time.monotonic()
                for batch in _batches(documents):
                    work.take(batch, on_progress)
                    if time.monotonic() - saved_s > checkpoint_s:
                        work.save(finished=False)
                        saved_s = time.monotonic()
                finished = True
            except KeyboardInterrupt:
                pass  # What was done is saved; the caller is told by the result.
            work.save(finished=finished)
        return Ingested(work.embedded, work.reused, finished)


class _Earlier:
    """What the index in the folder has: vectors by id, as long as the text is the same."""

    def __init__(self, index: SavedIndex | None) -> None:
        self._index = index
        self._known: dict[str, tuple[int, bytes]] = {}
        if index is not None:
            for number, record in enumerate(index.records.stream()):
                self._known[record.id] = (number, _digest(record.text))

    @classmethod
    def open(cls, folder: Path, embedder: Embedder) -> _Earlier:
        try:
            index = read_index(folder, expected_model=model_name(embedder))
            index.check_vectors()
        except (IndexFileError, ModelMismatchError):
            return cls(None)  # None yet, one of another model, or a damaged one: made anew.
        return cls(index)

    def find(self, document: Document) -> int | None:
        """Return the number of a document with the same id and text."""
        number, digest = self._known.get(document.id, (None, b""))
        return number if digest == _digest(document.text) else None

    def take(self, numbers: list[int]) -> _Embedded:
        """Return the vectors of documents, by their numbers."""
        if self._index is None or not numbers:
            return _NOTHING
        chosen = np.asarray(numbers, np.int64)
        parts = self._index.parts
        return _Embedded(self._index.vectors[parts.rows(chosen)], parts.keep(chosen))

    def not_in(self, seen: set[str]) -> Iterator[tuple[int, Record]]:
        """Yield the documents that were not seen, with their numbers."""
        for name, (number, _) in self._known.items():
            if name not in seen and self._index is not None:
                yield number, self._index.records[number]


class _Embedded(NamedTuple):
    """Documents' vectors, and which of them belong to which document."""

    vectors: Vectors
    parts: Parts


def _in_order(first: _Embedded, second: _Embedded, order: Rows) -> _Embedded:
    """Put documents together: ``order`` has the number of each, those of ``second`` behind."""
    if not len(second.parts):
        return first
    if not len(first.parts):
        return second
    parts = Parts.join([first.parts, second.parts])
    vectors = np.concatenate([first.vectors, second.vectors])
    return _Embedded(vectors[parts.rows(order)], parts.keep(order))


_NOTHING = _Embedded(np.empty((0, 0), np.float32), Parts(0))


class _Ingestion:
    """One run: vectors and records go into two files, from which the index is made."""

    def __init__(self, embedder: Embedder, folder: Path, earlier: _Earlier, spool: Path) -> None:
        self._embedder, self._folder, self._earlier = embedder, folder, earlier
        self._vectors_path, self._records_path = spool / "vectors", spool / "records"
        self._vectors: IO[bytes] = self._vectors_path.open("wb")
        self._records: IO[bytes] = self._records_path.open("wb")
        self._seen: set[str] = set()
        self._parts: list[Parts] = []
        self._dimension = 0
        self.embedded = self.reused = 0

    def take(self, batch: list[Document], on_progress: Callable[[int], object]) -> None:
        """Put a batch of documents behind those that are there."""
        numbers = [self._earlier.find(document) for document in batch]
        old = [place for place, number in enumerate(numbers) if number is not None]
        new = [place for place, number in enumerate(numbers) if number is None]
        kept = self._earlier.take([number for number in numbers if number is not None])
        on_progress(len(old))
        made = self._embed([batch[place] for place in new], on_progress)
        self._write(_in_order(kept, made, np.argsort([*old, *new])), batch)
        self._seen.update(document.id for document in batch)
        self.embedded += len(new)
        self.reused += len(old)

    def _embed(self, documents: list[Document], on_progress: Callable[[int], object]) -> _Embedded:
        if not documents:
            return _NOTHING
        inputs, parts = split((document.text, document.metadata) for document in documents)
        done = DocumentProgress(len(documents), len(inputs), on_progress)
        if getattr(self._embedder, "reports_progress", False):
            embed: Any = self._embedder.embed_documents
            return _Embedded(normalized(embed(inputs, on_progress=done)), parts)
        vectors = normalized(self._embedder.embed_documents(inputs))
        done(len(inputs))
        return _Embedded(vectors, parts)

    def _write(self, made: _Embedded, documents: Iterable[Document | Record]) -> None:
        for document in documents:
            self._records.write(_line(Record(document.id, document.text, document.metadata)))
        if len(made.parts):
            self._dimension = made.vectors.shape[1]
            self._parts.append(made.parts)
            self._vectors.write(np.ascontiguousarray(made.vectors).data)

    def save(self, *, finished: bool) -> None:
        """Make an index of all that was taken; of an earlier one too, what was not reached."""
        sizes = (self._vectors.tell(), self._records.tell())
        taken = len(self._parts)
        if not finished:
            left = list(self._earlier.not_in(self._seen))
            for start in range(0, len(left), BATCH):
                part = left[start : start + BATCH]
                made = self._earlier.take([number for number, _ in part])
                self._write(made, [record for _, record in part])
        self._vectors.flush()
        self._records.flush()
        parts = Parts.join(self._parts)
        vectors = np.empty((0, 0), np.float32)
        if len(parts):
            shape = (len(parts), self._dimension)
            vectors = np.memmap(self._vectors_path, np.float32, "r", shape=shape)
        replace_index(self._folder, model_name(self._embedder), vectors, self._stored(), parts)
        # What was not reached is read again from the earlier index when its turn comes.
        del self._parts[taken:]
        for file, position in zip((self._vectors, self._records), sizes, strict=True):
            file.seek(position)
            file.truncate()

    def _stored(self) -> Iterator[Record]:
        with self._records_path.open("rb") as file:
            for line in file:
                yield parse_record(line)

    def close(self) -> None:
        """Close both files."""
        self._vectors.close()
        self._records.close()


def _line(record: Record) -> bytes:
    try:
        return dump_record(record)
    except (TypeError, ValueError) as error:
        raise IndexFileError(f"the metadata of {record.id!r} are not JSON: {error}") from None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch
