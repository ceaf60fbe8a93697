"""Search by words: a tantivy index of the documents' stems, by the documents' numbers."""

from __future__ import annotations

import contextlib
import logging
import os
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

from rag_demo.errors import HOW_TO_INSTALL, RagDemoError
from rag_demo.store.tokens import STOP_WORDS, words_of
from rag_demo.vectors import Rows

__all__ = ["Words"]

log = logging.getLogger("rag_demo")

_MEMORY_BYTES = 16 << 20  # that tantivy collects before it writes
_LEAST = 128  # documents that are asked for at once

_WORDS: weakref.WeakSet[Words] = weakref.WeakSet()

Mask = npt.NDArray[np.bool_]


class Words:
    """The words of documents, in a temporary folder of this process.

    Documents are added in the order of their numbers and never removed; a search gets a mask of
    those that count. BM25 is tantivy's, with k1 = 1.2 and b = 0.75. The writer is open for a
    commit only: a forked child must not have one. Threads may share it.

    Args:
        read: Returns what `files` returned, to go on from there, and the number from which on
            documents are not in it.
    """

    def __init__(self, read: Callable[[], tuple[Mapping[str, bytes], int]] | None = None) -> None:
        self.end = 0
        self._read = read
        self._lock = threading.RLock()
        self._is_open = False
        self._index: Any = None
        self._folder: Path | None = None
        _WORDS.add(self)

    def _open(self) -> None:
        """Put the files that were read into a folder, once; damaged ones are made again."""
        if self._is_open:
            return
        self._is_open = True
        files, end = self._read() if self._read is not None else ({}, 0)
        try:
            for name, content in files.items():
                (self._made_folder() / Path(name).name).write_bytes(content)
            if files:
                self._index = _tantivy().Index.open(str(self._made_folder()))
                self.end = end
        except (ValueError, OSError) as error:
            log.debug("the words of an index are made again: %s", error)
            self._forget()

    def catch_up(self, end: int, texts_from: Callable[[int], Iterable[tuple[int, str]]]) -> None:
        """Add the documents before number ``end`` that it does not have yet.

        Args:
            end: See above.
            texts_from: Returns numbers and texts of the documents from a number on.

        Raises:
            RagDemoError: The index of words cannot be written.
        """
        with self._lock:
            self._open()
            if self.end >= end:
                return
            for is_last in (False, True):
                try:
                    self._add(texts_from(self.end), end)
                    return
                except (ValueError, OSError) as error:
                    self._forget()
                    # A forked child may still have the folder's lock: a new folder has none.
                    if is_last or "LockBusy" not in str(error):
                        raise RagDemoError(f"the words cannot be written: {error}") from None
                except BaseException:  # Nobody knows what was added: all of it is made again.
                    self._forget()
                    raise

    def _add(self, texts: Iterable[tuple[int, str]], end: int) -> None:
        tantivy = _tantivy()
        if self._index is None:
            self._index = tantivy.Index(_schema(), str(self._made_folder()))
        writer = self._index.writer(_MEMORY_BYTES, 1)
        for number, text in texts:
            if number >= end:
                break
            document = tantivy.Document()
            for words in words_of(text):
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
            query: The question.
            counts: Whether a document counts, by its number: shape (numbers,).
            top_k: How many; all that tie with the last one are found too.

        Returns:
            Numbers and scores: shape (n,) each, in no order.
        """
        with self._lock:
            self._open()
            if self._index is None:
                return np.empty(0, np.int64), np.empty(0)
            searcher = self._index.searcher()
        tantivy = _tantivy()
        terms = [
            (tantivy.Occur.Should, tantivy.Query.term_query(_schema(), "words", stem, "freq"))
            for words in words_of(query, is_query=True)
            for stem in _stems(words)
        ]
        if not terms:
            return np.empty(0, np.int64), np.empty(0)
        parsed = tantivy.Query.boolean_query(terms)
        limit, available = max(_LEAST, 2 * top_k), max(1, searcher.num_docs)
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
            # Complete if the worst of all that was found is worse than the k-th that counts.
            if len(hits) < limit or limit == available or (
                len(found) >= top_k and scores[-1] < found[top_k - 1]
            ):  # fmt: skip
                return numbers[good], found
            limit *= 4

    def files(self) -> dict[str, bytes]:
        """Return what makes it again: the contents of its files by their names."""
        with self._lock:
            if self._index is None or self._folder is None:
                return {}
            names = [path for path in self._folder.iterdir() if path.suffix != ".lock"]
            return {path.name: path.read_bytes() for path in names}

    def close(self) -> None:
        """Remove the temporary folder."""
        with self._lock:
            self._read = None
            self._forget()

    def _made_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rag-demo-words-"))
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
        return self._folder

    def _forget(self) -> None:
        folder, self._folder, self._index, self.end = self._folder, None, None, 0
        if folder is not None:
            self._remove()

    def _leave_to_parent(self) -> None:
        """In a forked child, forget the folder and the index of the parent process."""
        self._lock = threading.RLock()
        if self._folder is not None:
            self._remove.detach()
        self._folder, self._index, self.end, self._is_open = None, None, 0, False


def _after_fork() -> None:
    for words in list(_WORDS):
        words._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
        raise RagDemoError(f"a search by words needs {name}; {HOW_TO_INSTALL}") from None
