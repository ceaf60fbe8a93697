"""Full-text search: a tantivy index of the documents' stems, by document number."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.database import FORK_AWARE
from rag_demo.errors import HOW_TO_INSTALL, RagDemoError
from rag_demo.store.tokens import STOP_WORDS, tokenize
from rag_demo.vectors import Mask, Rows

log = logging.getLogger("rag_demo")

_MEMORY_BYTES = 16 << 20  # that tantivy collects before it writes
_FEWEST_HITS = 128


class TextIndex:
    """A full-text index in a temporary folder, for any number of threads.

    Documents are added in the order of their numbers and never removed. A search gets a mask of
    those that still exist. Scores are tantivy's BM25 with k1 = 1.2 and b = 0.75. The writer is
    open during a commit only, because a forked child must not inherit one.

    Args:
        read: Returns what `files` returned earlier, and the first document number that is
            missing there.
    """

    def __init__(self, read: Callable[[], tuple[Mapping[str, bytes], int]] | None = None) -> None:
        self.end = 0
        self._read = read
        self._lock = threading.RLock()
        self._is_open = False
        self._index: Any = None
        self._folder: Path | None = None
        self._remove: weakref.finalize[Any, Any] | None = None
        FORK_AWARE.add(self)

    def _open(self) -> None:
        """Write the saved files into a folder, once in each process. Damaged ones are dropped."""
        if self._is_open:
            return
        self._is_open = True
        files, end = self._read() if self._read is not None else ({}, 0)
        try:
            for name, content in files.items():
                (self._ensure_folder() / Path(name).name).write_bytes(content)
            if files:
                self._index = _tantivy().Index.open(str(self._ensure_folder()))
                self.end = end
        except (ValueError, OSError) as error:
            log.debug("the full-text index of a saved index is rebuilt: %s", error)
            self._forget()

    def catch_up(self, end: int, texts_from: Callable[[int], Iterable[tuple[int, str]]]) -> None:
        """Add the missing documents.

        Args:
            end: Add the documents with smaller numbers.
            texts_from: Returns numbers and texts of the documents from a number on.

        Raises:
            RagDemoError: The full-text index cannot be written.
        """
        with self._lock:
            self._open()
            if self.end >= end:
                return
            try:
                self._add(texts_from(self.end), end)
            except BaseException as error:  # Some may have been added: rebuild it next time.
                self._forget()
                if not isinstance(error, (ValueError, OSError)):
                    raise
                raise RagDemoError(f"the full-text index cannot be written: {error}") from None

    def _add(self, texts: Iterable[tuple[int, str]], end: int) -> None:
        tantivy = _tantivy()
        if self._index is None:
            self._index = tantivy.Index(_schema(), str(self._ensure_folder()))
        writer = self._index.writer(_MEMORY_BYTES, 1)
        for number, text in texts:
            if number >= end:
                break
            document = tantivy.Document()
            for words in tokenize(text):
                document.add_text("words", " ".join(_stems(words)))
            document.add_unsigned("number", number)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self.end = end

    def search(self, query: str, counts: Mask, top_k: int) -> tuple[Rows, npt.NDArray[np.float64]]:
        """Find the documents that have words of a query.

        Args:
            query: The query.
            counts: Whether each document number counts: shape (numbers,).
            top_k: How many to find; all that tie with the last one are found too.

        Returns:
            Document numbers and scores, in no order: shape (n,) each.
        """
        with self._lock:
            self._open()
            if self._index is None:
                return np.empty(0, np.int64), np.empty(0)
            searcher = self._index.searcher()
        tantivy = _tantivy()
        terms = [
            (tantivy.Occur.Should, tantivy.Query.term_query(_schema(), "words", stem, "freq"))
            for words in tokenize(query, is_query=True)
            for stem in _stems(words)
        ]
        if not terms:
            return np.empty(0, np.int64), np.empty(0)
        parsed = tantivy.Query.boolean_query(terms)
        limit, available = max(_FEWEST_HITS, 2 * top_k), max(1, searcher.num_docs)
        while True:
            limit = min(limit, available)
            hits = searcher.search(parsed, limit, count=False).hits
            numbers = np.asarray(
                searcher.fast_field_values("number", [address for _, address in hits]), np.int64
            )
            scores = np.fromiter((score for score, _ in hits), np.float64, len(hits))
            good = numbers < len(counts)
            good[good] = counts[numbers[good]]
            found = scores[good]
            # Complete if the worst hit is worse than the k-th that counts.
            if len(hits) < limit or limit == available or (
                len(found) >= top_k and scores[-1] < found[top_k - 1]
            ):  # fmt: skip
                return numbers[good], found
            limit *= 4

    def files(self) -> dict[str, bytes]:
        """Return the contents of the index's files by name."""
        with self._lock:
            if self._index is None or self._folder is None:
                return {}
            paths = [path for path in self._folder.iterdir() if path.suffix != ".lock"]
            return {path.name: path.read_bytes() for path in paths}

    def close(self) -> None:
        """Remove the temporary folder."""
        with self._lock:
            self._read = None
            self._forget()

    def _ensure_folder(self) -> Path:
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rag-demo-words-"))
            self._remove = weakref.finalize(self, shutil.rmtree, folder, True)
            self._folder = folder
        return self._folder

    def _forget(self) -> None:
        self._folder, self._index, self.end = None, None, 0
        if self._remove is not None:
            self._remove()

    def leave_to_parent(self) -> None:
        """In a forked child, forget the folder and the index of the parent process."""
        self._lock = threading.RLock()
        if self._remove is not None:
            self._remove.detach()
        self._folder, self._index, self.end, self._is_open = None, None, 0, False


def _stems(words: Iterable[str]) -> Iterator[str]:
    return (_stem(word) for word in words if word not in STOP_WORDS)


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    stemmed: str = _stemmer()(word)
    return stemmed


@cache
def _stemmer() -> Any:
    with _installed():
        import Stemmer

        return Stemmer.Stemmer("english", 0).stemWord


@cache
def _tantivy() -> Any:
    with _installed():
        import tantivy

        return tantivy


@cache
def _schema() -> Any:
    builder = _tantivy().SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    return builder.build()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        name = "PyStemmer" if error.name == "Stemmer" else error.name
        raise RagDemoError(f"full-text search needs {name}; {HOW_TO_INSTALL}") from None
