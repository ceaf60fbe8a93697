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
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rag_demo.corpus import Document
from rag_demo.errors import IndexFileError, ModelMismatchError
from rag_demo.index import SPOOL, SavedIndex, read_index, refuse_foreign_folder, replace_index
from rag_demo.index_files import lock
from rag_demo.records import Record, dump_record, parse_record
from rag_demo.retriever import Embedder, model_name
from rag_demo.vectors import normalized

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
        self._rows: dict[str, tuple[int, bytes]] = {}
        if index is not None:
            for row, record in enumerate(index.records.stream()):
                self._rows[record.id] = (row, _digest(record.text))

    @classmethod
    def open(cls, folder: Path, embedder: Embedder) -> _Earlier:
        try:
            index = read_index(folder, expected_model=model_name(embedder))
            index.check_vectors()
        except (IndexFileError, ModelMismatchError):
            return cls(None)  # None yet, one of another model, or a damaged one: made anew.
        return cls(index)

    def find(self, document: Document) -> int | None:
        """Return the row of a document with the same id and text."""
        row, digest = self._rows.get(document.id, (None, b""))
        return row if digest == _digest(document.text) else None

    def vectors(self, rows: list[int]) -> npt.NDArray[np.float32]:
        """Return vectors by their rows."""
        assert self._index is not None
        return self._index.vectors[rows]

    def not_in(self, seen: set[str]) -> Iterator[tuple[int, Record]]:
        """Yield the documents that were not seen, with their rows."""
        for name, (row, _) in self._rows.items():
            if name not in seen and self._index is not None:
                yield row, self._index.records[row]


class _Ingestion:
    """One run: vectors and records go into two files, from which the index is made."""

    def __init__(self, embedder: Embedder, folder: Path, earlier: _Earlier, spool: Path) -> None:
        self._embedder, self._folder, self._earlier = embedder, folder, earlier
        self._vectors_path, self._records_path = spool / "vectors", spool / "records"
        self._vectors: IO[bytes] = self._vectors_path.open("wb")
        self._records: IO[bytes] = self._records_path.open("wb")
        self._seen: set[str] = set()
        self._dimension = 0
        self.embedded = self.reused = 0

    def take(self, batch: list[Document], on_progress: Callable[[int], object]) -> None:
        """Put a batch of documents behind those that are there."""
        rows = [self._earlier.find(document) for document in batch]
        new = [position for position, row in enumerate(rows) if row is None]
        old = [position for position, row in enumerate(rows) if row is not None]
        made = self._embed([batch[position].text for position in new], on_progress)
        kept = self._earlier.vectors([row for row in rows if row is not None]) if old else made
        on_progress(len(old))
        vectors = np.empty((len(batch), kept.shape[1]), np.float32)
        if new:
            vectors[new] = made
        if old:
            vectors[old] = kept
        self._write(vectors, [Record(d.id, d.text, d.metadata) for d in batch])
        self.embedded += len(new)
        self.reused += len(old)

    def _embed(
        self, texts: list[str], on_progress: Callable[[int], object]
    ) -> npt.NDArray[np.float32]:
        if not texts:
            return np.empty((0, 0), np.float32)
        if getattr(self._embedder, "reports_progress", False):
            embed: Any = self._embedder.embed_documents
            return normalized(embed(texts, on_progress=on_progress))
        vectors = normalized(self._embedder.embed_documents(texts))
        on_progress(len(texts))
        return vectors

    def _write(self, vectors: npt.NDArray[np.float32], records: list[Record]) -> None:
        self._dimension = vectors.shape[1]
        for record in records:
            self._records.write(_line(record))
            self._seen.add(record.id)
        self._vectors.write(np.ascontiguousarray(vectors).data)

    def save(self, *, finished: bool) -> None:
        """Make an index of all that was taken; of an earlier one too, what was not reached."""
        if not finished:
            left = list(self._earlier.not_in(self._seen))
            size = (self._vectors.tell(), self._records.tell())
            for start in range(0, len(left), BATCH):
                part = left[start : start + BATCH]
                vectors = self._earlier.vectors([row for row, _ in part])
                self._vectors.write(np.ascontiguousarray(vectors).data)
                self._records.writelines(_line(record) for _, record in part)
                self._dimension = vectors.shape[1]
        self._vectors.flush()
        self._records.flush()
        count = self._vectors.tell() // (4 * self._dimension) if self._dimension else 0
        vectors = np.empty((0, 0), np.float32)
        if count:
            shape = (count, self._dimension)
            vectors = np.memmap(self._vectors_path, np.float32, "r", shape=shape)
        replace_index(self._folder, model_name(self._embedder), vectors, self._stored())
        if not finished:  # Those are read again from the earlier index when their turn comes.
            for file, position in zip((self._vectors, self._records), size, strict=True):
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
