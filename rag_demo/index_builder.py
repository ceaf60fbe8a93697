"""IndexBuilder: an index in the making, of which every moment can be the last."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, dump_document, parse_document
from rag_demo.documents.rows import DocumentProgress, DocumentRows, texts_to_embed
from rag_demo.encoding.embedder import Embedder
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import IndexFileError, UnreadableIndexError, unwritable
from rag_demo.index import SavedIndex, identity_of, read_index, read_manifest, replace_index
from rag_demo.searching.derived import derived_arrays
from rag_demo.vectors import Rows, Vectors, normalized

__all__ = ["IndexBuilder"]

_AT_ONCE = 512  # texts between two moments when a batch may be saved in part, at least
_PART_S = 5.0  # what such a part should take
_LEFT_AT_ONCE = 2048  # documents of an earlier index that are copied at once
_PENDING = ("pending.keys", "pending.vectors")

Digest = bytes


class _Embedded(NamedTuple):
    """Documents' vectors, and which of them belong to which document."""

    vectors: Vectors
    rows: DocumentRows


class _Taken(NamedTuple):
    """How far the two files count. What lies behind was interrupted, and is written over."""

    documents: int = 0
    batches: int = 0
    rows: int = 0
    documents_bytes: int = 0
    vectors_bytes: int = 0


_NOTHING = _Embedded(np.empty((0, 0), np.float32), DocumentRows(0))


class IndexBuilder:
    """Vectors and documents go into two nameless files, from which an index is made.

    A batch counts from one assignment on, so that an interruption anywhere leaves all of it or
    nothing. What was embedded of an unfinished batch is saved as derived arrays, by text.

    Args:
        embedder: What makes vectors.
        folder: Of the index; the caller holds its lock. An earlier one of the same model is
            used, as far as documents are the same.
        source: What the documents are of, for the manifest.

    Attributes:
        embedded, reused: How many documents were, and had been before.
    """

    def __init__(self, embedder: Embedder, folder: Path, source: str | None) -> None:
        self.embedded = self.reused = 0
        self._embedder, self._folder, self._source = embedder, folder, source
        self._identity = embedder.identity
        self._earlier = _EarlierIndex.open(folder, self._identity)
        self._pending = self._earlier.pending()
        self._has_pending_news = False
        self._used: set[Digest] = set()
        self._taken = _Taken()
        self._number_of: dict[str, int] = {}
        self._rows: list[DocumentRows] = []
        self._dimension = 0
        with _written_to(folder):
            # Without names nothing is left behind, not even when the process is killed.
            self._vectors, self._documents = _nameless(folder), _nameless(folder)

    def __enter__(self) -> IndexBuilder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in (self._vectors, self._documents):
            with contextlib.suppress(OSError):  # A full disk, which was said when it was met.
                file.close()

    @property
    def has_news(self) -> bool:
        """Whether there is anything that a save would add."""
        return self._taken.documents > 0 or self._has_pending_news

    def take(
        self,
        batch: list[Document],
        on_progress: Callable[[int], object],
        on_part: Callable[[], object],
    ) -> None:
        """Put a batch of documents behind those that are there.

        Args:
            batch: The documents, checked.
            on_progress: Called with counts of documents.
            on_part: Called now and then in between; it may `save`.
        """
        self._number(batch)
        numbers = [self._earlier.find(document) for document in batch]
        old = [place for place, number in enumerate(numbers) if number is not None]
        new = [place for place, number in enumerate(numbers) if number is None]
        kept = self._earlier.take([number for number in numbers if number is not None])
        if old:
            on_progress(len(old))
        made = self._embed([batch[place] for place in new], on_progress, on_part)
        self._taken = self._write(_in_order(kept, made, np.argsort([*old, *new])), batch)
        self.embedded += len(new)
        self.reused += len(old)
        self._pending = {key: self._pending[key] for key in self._pending.keys() - self._used}
        self._has_pending_news = False

    def save(self, *, finished: bool) -> None:
        """Make an index of all that was taken; of an earlier one too, what was not reached."""
        taken = self._taken
        if not finished:
            for some in self._earlier.not_in(self._is_taken, _LEFT_AT_ONCE):
                made = self._earlier.take([number for number, _ in some])
                taken = self._write(made, [document for _, document in some], taken)
        pending = {} if finished else self._pending
        derived: dict[str, npt.NDArray[np.generic]] = {}
        if pending:
            keys = np.frombuffer(b"".join(pending), np.uint8).reshape(len(pending), -1)
            derived = dict(zip(_PENDING, (keys, np.stack(list(pending.values()))), strict=True))
        vectors = np.empty((0, 0), np.float32)
        if taken.rows:
            shape = (taken.rows, self._dimension)
            vectors = np.memmap(self._vectors, np.float32, "c", shape=shape)
        rows = DocumentRows.join(self._rows[: taken.batches])
        if finished:
            derived = derived_arrays(vectors, _Lines(self._documents, taken.documents), rows)
        replace_index(
            self._folder,
            self._identity,
            vectors,
            self._stored(taken.documents),
            rows,
            derived,
            source=self._source,
            finished=finished,
        )

    def _number(self, batch: list[Document]) -> None:
        """Give the documents of a batch their numbers."""
        for number, document in enumerate(batch, self._taken.documents):
            if self._number_of.setdefault(document.id, number) != number:
                raise IndexFileError(f"the id {document.id!r} stands twice; ids must differ")

    def _is_taken(self, name: str) -> bool:
        return self._number_of.get(name, self._taken.documents) < self._taken.documents

    def _embed(
        self,
        documents: list[Document],
        on_progress: Callable[[int], object],
        on_part: Callable[[], object],
    ) -> _Embedded:
        if not documents:
            self._used = set()
            return _NOTHING
        texts, rows = texts_to_embed((each.text, each.metadata) for each in documents)
        progress = DocumentProgress(len(documents), len(texts), on_progress)
        keys = [_digest(text) for text in texts]
        self._used = set(keys)
        missing = [row for row, key in enumerate(keys) if key not in self._pending]
        progress(len(texts) - len(missing))
        start, at_once = 0, _AT_ONCE
        while some := missing[start : start + at_once]:
            if start:
                on_part()
            started_s = time.monotonic()
            asked = [texts[row] for row in some]
            embedded = self._embedder.embed_documents(asked, on_progress=progress)
            made = normalized(embedded, len(asked))
            # All at once, as far as an interruption goes.
            self._pending = self._pending | {keys[row]: made[n] for n, row in enumerate(some)}
            self._has_pending_news = True
            start += at_once
            at_once *= 1 + (time.monotonic() - started_s < _PART_S)  # A fast model takes more.
        return _Embedded(np.stack([self._pending[key] for key in keys]), rows)

    def _write(
        self, made: _Embedded, documents: Iterable[Document], after: _Taken | None = None
    ) -> _Taken:
        """Write behind what was taken; nothing counts until what is returned is kept."""
        taken = after or self._taken
        lines = b"".join(map(dump_document, documents))
        with _written_to(self._folder):
            for file, start, data in (
                (self._documents, taken.documents_bytes, lines),
                (self._vectors, taken.vectors_bytes, np.ascontiguousarray(made.vectors).data),
            ):
                file.seek(start)
                file.write(data)
                file.flush()
        if len(made.rows):
            if taken.rows and made.vectors.shape[1] != self._dimension:
                raise ValueError(
                    f"the model's vectors have {made.vectors.shape[1]} dimensions, "
                    f"those before {self._dimension}"
                )
            self._dimension = made.vectors.shape[1]
        self._rows[taken.batches :] = [made.rows]
        return _Taken(
            taken.documents + made.rows.documents,
            taken.batches + 1,
            taken.rows + len(made.rows),
            taken.documents_bytes + len(lines),
            taken.vectors_bytes + made.vectors.nbytes,
        )

    def _stored(self, count: int) -> Iterator[Document]:
        self._documents.seek(0)
        for _ in range(count):
            yield parse_document(self._documents.readline())


class _Lines:
    """The first documents of a file, read one by one."""

    def __init__(self, file: IO[bytes], count: int) -> None:
        self._file = file
        file.seek(0)
        lengths = (len(file.readline()) for _ in range(count))
        self._offsets = [0, *itertools.accumulate(lengths)]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, number: int) -> Document:
        self._file.seek(self._offsets[number])
        return parse_document(self._file.readline())


class _EarlierIndex:
    """What the index in the folder has: vectors by id, as long as the document is the same."""

    def __init__(self, index: SavedIndex | None) -> None:
        self._index = index
        self._known: dict[str, tuple[int, bytes]] = {}
        if index is not None:
            for number, document in enumerate(index.documents.stream()):
                self._known[document.id] = (number, _document_digest(document))

    @classmethod
    def open(cls, folder: Path, identity: ModelIdentity) -> _EarlierIndex:
        try:
            if not identity_of(read_manifest(folder)).is_same(identity):
                return cls(None)
            index = read_index(folder)
            index.check_vectors()
            return cls(index)
        except UnreadableIndexError:
            raise  # What it has may be whole.
        except IndexFileError:
            return cls(None)  # None yet, or a damaged one: made anew.

    def find(self, document: Document) -> int | None:
        """Return the number of a document that is embedded as this one would be."""
        number, digest = self._known.get(document.id, (0, b""))
        if self._index is None or digest != _document_digest(document):
            return None
        rows = self._index.rows
        _, wanted = texts_to_embed([(document.text, document.metadata)])
        # By other passages, or by none, it is another document.
        if wanted.are_whole:
            return number if rows.counts is None or rows.counts[number] == 1 else None
        found = rows.keep(np.asarray([number], np.int64))
        if found.spans is None or wanted.spans is None:
            return None
        return number if np.array_equal(found.spans, wanted.spans) else None

    def take(self, numbers: list[int]) -> _Embedded:
        """Return the vectors of documents, by their numbers."""
        if self._index is None or not numbers:
            return _NOTHING
        chosen = np.asarray(numbers, np.int64)
        rows = self._index.rows
        return _Embedded(self._index.vectors[rows.rows_of(chosen)], rows.keep(chosen))

    def not_in(
        self, is_taken: Callable[[str], bool], at_once: int
    ) -> Iterator[list[tuple[int, Document]]]:
        """Yield the documents that were not taken, with their numbers, some at once."""
        if self._index is None:
            return
        left = [number for name, (number, _) in self._known.items() if not is_taken(name)]
        for start in range(0, len(left), at_once):
            numbers = left[start : start + at_once]
            yield [(number, self._index.documents[number]) for number in numbers]

    def pending(self) -> dict[Digest, Vectors]:
        """Return vectors of a batch that was interrupted, by their texts."""
        if self._index is None:
            return {}
        try:
            keys, vectors = (self._index.derived[name] for name in _PENDING)
        except (KeyError, IndexFileError):
            return {}  # None, or damaged: embedded again.
        if keys.ndim != 2 or vectors.ndim != 2 or len(keys) != len(vectors):
            return {}
        return {key.tobytes(): vector for key, vector in zip(keys, vectors, strict=True)}


def _in_order(first: _Embedded, second: _Embedded, order: Rows) -> _Embedded:
    """Put documents together: ``order`` has the number of each, those of ``second`` behind."""
    if not len(second.rows):
        return first
    if not len(first.rows):
        return second
    rows = DocumentRows.join([first.rows, second.rows])
    vectors = np.concatenate([first.vectors, second.vectors])
    return _Embedded(vectors[rows.rows_of(order)], rows.keep(order))


def _digest(text: str) -> Digest:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _document_digest(document: Document) -> Digest:
    """Digest what is embedded of a document: its text, and the title before its passages."""
    title = document.metadata.get("title")
    return _digest(document.text if title is None else f"{title!r}\0{document.text}")


def _nameless(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, prefix=".tmp")


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error
