"""Ingestion: documents into a saved index, streamed, continued, and only as far as needed.

What the index in the folder has already is taken from there when its text is the same: that is
how an interrupted run goes on, and how a folder is indexed again after changes.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from rag_demo.documents.document import Document, dump_document, parse_document
from rag_demo.documents.rows import DocumentProgress, DocumentRows, texts_to_embed
from rag_demo.encoding.embedder import BasicEmbedder, Embedder, completed
from rag_demo.errors import IndexFileError, ModelMismatchError
from rag_demo.index import SavedIndex, read_index, refuse_foreign_folder, replace_index
from rag_demo.storage.manifest import SPOOL
from rag_demo.storage.writing import lock
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
    embedding_model: BasicEmbedder,
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
        embedding_model: What makes vectors; called only for texts that are new or have changed.
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
        with (
            tempfile.TemporaryDirectory(prefix=SPOOL, dir=folder) as spool,
            _IndexBuilder(completed(embedding_model), folder, Path(spool)) as builder,
        ):
            finished = False
            try:
                saved_s = time.monotonic()
                for batch in _batches(documents):
                    builder.take(batch, on_progress)
                    if time.monotonic() - saved_s > checkpoint_s:
                        builder.save(finished=False)
                        saved_s = time.monotonic()
                finished = True
            except KeyboardInterrupt:
                pass  # What was done is saved; the caller is told by the result.
            builder.save(finished=finished)
        return Ingested(builder.embedded, builder.reused, finished)


def _remove_spools(folder: Path) -> None:
    """Remove what a killed run has left behind."""
    for left in folder.glob(f"{SPOOL}*"):
        shutil.rmtree(left, ignore_errors=True)


class _EarlierIndex:
    """What the index in the folder has: vectors by id, as long as the text is the same."""

    def __init__(self, index: SavedIndex | None) -> None:
        self._index = index
        self._known: dict[str, tuple[int, bytes]] = {}
        if index is not None:
            for number, document in enumerate(index.documents.stream()):
                self._known[document.id] = (number, _digest(document.text))

    @classmethod
    def open(cls, folder: Path, embedder: Embedder) -> _EarlierIndex:
        try:
            index = read_index(folder, expected_model=embedder.identity)
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
        rows = self._index.rows
        return _Embedded(self._index.vectors[rows.rows_of(chosen)], rows.keep(chosen))

    def not_in(self, seen: set[str]) -> Iterator[tuple[int, Document]]:
        """Yield the documents that were not seen, with their numbers."""
        for name, (number, _) in self._known.items():
            if name not in seen and self._index is not None:
                yield number, self._index.documents[number]


class _Embedded(NamedTuple):
    """Documents' vectors, and which of them belong to which document."""

    vectors: Vectors
    rows: DocumentRows


def _in_order(first: _Embedded, second: _Embedded, order: Rows) -> _Embedded:
    """Put documents together: ``order`` has the number of each, those of ``second`` behind."""
    if not len(second.rows):
        return first
    if not len(first.rows):
        return second
    rows = DocumentRows.join([first.rows, second.rows])
    vectors = np.concatenate([first.vectors, second.vectors])
    return _Embedded(vectors[rows.rows_of(order)], rows.keep(order))


_NOTHING = _Embedded(np.empty((0, 0), np.float32), DocumentRows(0))


class _IndexBuilder:
    """An index in the making: vectors and documents go into two files, from which it is made."""

    def __init__(self, embedder: Embedder, folder: Path, spool: Path) -> None:
        self._embedder, self._folder = embedder, folder
        self._earlier = _EarlierIndex.open(folder, embedder)
        self._vectors_path, self._documents_path = spool / "vectors", spool / "documents"
        self._vectors: IO[bytes] = self._vectors_path.open("wb")
        self._documents: IO[bytes] = self._documents_path.open("wb")
        self._seen: set[str] = set()
        self._rows: list[DocumentRows] = []
        self._dimension = 0
        self.embedded = self.reused = 0

    def __enter__(self) -> _IndexBuilder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._vectors.close()
        self._documents.close()

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
        to_embed, rows = texts_to_embed((each.text, each.metadata) for each in documents)
        progress = DocumentProgress(len(documents), len(to_embed), on_progress)
        vectors = self._embedder.embed_documents(to_embed, on_progress=progress)
        return _Embedded(normalized(vectors), rows)

    def _write(self, made: _Embedded, documents: Iterable[Document]) -> None:
        for document in documents:
            self._documents.write(_line(document))
        if len(made.rows):
            self._dimension = made.vectors.shape[1]
            self._rows.append(made.rows)
            self._vectors.write(np.ascontiguousarray(made.vectors).data)

    def save(self, *, finished: bool) -> None:
        """Make an index of all that was taken; of an earlier one too, what was not reached."""
        sizes = (self._vectors.tell(), self._documents.tell())
        taken = len(self._rows)
        if not finished:
            left = list(self._earlier.not_in(self._seen))
            for start in range(0, len(left), BATCH):
                some = left[start : start + BATCH]
                made = self._earlier.take([number for number, _ in some])
                self._write(made, [document for _, document in some])
        self._vectors.flush()
        self._documents.flush()
        rows = DocumentRows.join(self._rows)
        vectors = np.empty((0, 0), np.float32)
        if len(rows):
            shape = (len(rows), self._dimension)
            vectors = np.memmap(self._vectors_path, np.float32, "r", shape=shape)
        replace_index(self._folder, self._embedder.identity, vectors, self._stored(), rows)
        # What was not reached is read again from the earlier index when its turn comes.
        del self._rows[taken:]
        for file, position in zip((self._vectors, self._documents), sizes, strict=True):
            file.seek(position)
            file.truncate()

    def _stored(self) -> Iterator[Document]:
        with self._documents_path.open("rb") as file:
            for line in file:
                yield parse_document(line)


def _line(document: Document) -> bytes:
    try:
        return dump_document(document)
    except (TypeError, ValueError) as error:
        raise IndexFileError(f"the metadata of {document.id!r} are not JSON: {error}") from None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch
