"""Full-text search: a tantivy index of the documents' stems, by document number.

A folder of a saved index never changes. What it lacks is added to a copy in a temporary folder.

Chinese, Japanese, Thai, Lao, Khmer and Burmese have no spaces between words. So their texts are
indexed by characters and by pairs of neighbours, as Lucene's CJKAnalyzer does, and queries are
cut into pairs. Words of other scripts keep their combining marks, such as the vowels of Hindi. The
points of Hebrew and Arabic are left out, because most texts omit them. Time is linear in the text.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import re
import shutil
import sys
import tempfile
import threading
import unicodedata
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.errors import InvalidValueError, RagDemoError, short_repr
from rag_demo.reading.passages import titled
from rag_demo.stores.documents import DocumentTable
from rag_demo.vectors import Mask, Rows

# Lucene's English stop words.
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

_LONGEST = 64  # characters of a word; longer words are cut off
_UNSPACED = (
    "\u0e01-\u0e4e\u0e80-\u0ece\u1000-\u109f\u1780-\u17d3"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
# A word, also C++, g++, C# and F#.
_ASCII_WORD = re.compile(r"\w+(?:\+\+(?!\w)|(?<=\b\w)#(?!\w))?")
_CONTRACTION = re.compile(r"(?<=\w)'(?:s|t|m|d|re|ve|ll)\b")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]").match
# Points of Hebrew and Arabic; joiners and non-joiners; the dot of a lower-cased Turkish capital.
_LEFT_OUT = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u0652\u0670\u200c\u200d]|(?<=i)\u0307"
)


# An identifier of several words, and its words: get_userName, HTTPServer, v2_13.
_IDENTIFIER = re.compile(r"\b(?=\w*(?:[a-z0-9][A-Z]|[A-Z][A-Z][a-z]|[^\W_]_[^\W_]))\w+", re.ASCII)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
# What has no accent in Unicode: of German, French, Danish, Polish, Croatian and Turkish.
_LETTERS = str.maketrans({"\u00df": "ss", "\u00e6": "ae", "\u0153": "oe", "\u00f8": "o"})
_LETTERS |= str.maketrans({"\u0142": "l", "\u0111": "d", "\u0131": "i"})


def tokenize(text: str, *, is_query: bool = False) -> list[str]:
    """Return the words of a text, in lower case and with stop words.

    The words of an identifier, and a word without its accents, follow besides the whole.
    """
    parts = [each.lower() for found in _IDENTIFIER.findall(text) for each in _PARTS.findall(found)]
    is_ascii = text.isascii()
    if not is_ascii:
        text = unicodedata.normalize("NFKC", text).replace("\u2019", "'")
    text = text.lower()
    if not is_ascii:
        text = _LEFT_OUT.sub("", text)
    if "'" in text:
        text = _CONTRACTION.sub(" ", text)
    words: list[str] = (_ASCII_WORD if is_ascii else _word()).findall(text)
    if not is_ascii:
        words = [each for word in words for each in _of_run(word, is_query)]
    if any(len(word) > _LONGEST or word.endswith("++") for word in words):
        words = [each for word in words for each in _split(word)]
    if not is_ascii:
        words += [plain for word in words if (plain := _without_accents(word)) != word]
    return words + parts


def _without_accents(word: str) -> str:
    if word.isascii():
        return word
    plain = _ACCENTS.sub("", unicodedata.normalize("NFD", word)).translate(_LETTERS)
    return unicodedata.normalize("NFC", plain)


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word in any script. Making it takes 50 ms."""
    marks = "".join(c for c in map(chr, range(0x300, sys.maxunicode + 1))
                    if unicodedata.category(c)[0] == "M" and not _IS_UNSPACED(c))  # fmt: skip
    letter = rf"(?:[^\W{_UNSPACED}]|[{re.escape(marks)}])"
    return re.compile(rf"[{_UNSPACED}]+|{letter}+(?:\+\+(?!{letter})|(?<=\b\w)#(?!{letter}))?")


def _of_run(run: str, is_query: bool) -> Sequence[str]:
    if not _IS_UNSPACED(run):
        return (run,)
    pairs = list(map(operator.add, run, run[1:]))
    return pairs if is_query and pairs else [*pairs, *run]


def _split(word: str) -> tuple[str, ...]:
    word = word[:_LONGEST]
    name = word.rstrip("+")
    # A search for Notepad finds Notepad++. But C is another language than C++.
    return (word, name) if word.endswith("++") and len(name) > 1 else (word,)


log = logging.getLogger("rag_demo")

_MEMORY_BYTES = 16 << 20  # that tantivy collects before it writes
_FEWEST_HITS = 128
_MOST_TERMS = 1024  # of a query; more take seconds in a large index


class WordsFolder(NamedTuple):
    """A folder with a full-text index, which never changes.

    Attributes:
        folder: The folder.
        end: It has the documents with smaller numbers.
        checksum: The checksum of its files.
    """

    folder: Path
    end: int
    checksum: int

    @property
    def is_whole(self) -> bool:
        """Whether the folder exists, and its files can be read and have their checksum."""
        try:
            return checksum_of(self.folder) == self.checksum
        except OSError:
            return False


def copy_words(known: WordsFolder | None, folder: Path) -> int:
    """Make a folder with a copy of an index, and return its end; 0 if it is damaged or gone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if known is not None and known.end:
        with contextlib.suppress(OSError):  # A writer has removed it.
            for path in known.folder.iterdir():
                shutil.copyfile(path, folder / path.name)  # Without a mode that forbids writing.
        if known._replace(folder=folder).is_whole:
            return known.end
        copy_words(None, folder)
    return 0


def checksum_of(folder: Path) -> int:
    """Return a checksum of the files of a folder and of their names."""
    checksum = 0
    for path in sorted(folder.iterdir()):
        if path.suffix != ".lock":
            checksum = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), checksum))
    return checksum


def _opened(folder: Path) -> Any:
    """Open the index in a folder, or make one; it starts no thread to watch the folder."""
    import tantivy

    index = tantivy.Index(_schema(), str(folder))
    index.config_reader("manual")
    return index


class TextIndex:
    """The full-text index of a store, for any number of threads.

    Documents are added in the order of their numbers and never removed. A search gets a mask of
    those that still exist. Scores are tantivy's BM25 with k1 = 1.2 and b = 0.75.

    What a saved folder lacks is added to a copy in a temporary folder, which `close` removes, at
    the latest at exit. A forked child makes its own; a killed process leaves its folder behind.

    Args:
        language: The language of stems; see `stems_of`.
        saved: The saved folder, which is not changed.

    Attributes:
        end: The documents with smaller numbers are found.
    """

    def __init__(self, language: str, saved: WordsFolder | None = None) -> None:
        self.language, self._saved = language, saved
        self._lock = threading.RLock()
        self._index: Any = None
        self.end = 0
        self._own: Path | None = None  # the temporary folder, if it has all that is found
        self._remove: Callable[[], object] = lambda: None
        self._process = 0  # that made the temporary folder
        if saved is not None and saved.end:
            try:
                if checksum_of(saved.folder) == saved.checksum:  # tantivy trusts its files.
                    self._index, self.end = _opened(saved.folder), saved.end
                else:
                    log.warning("the full-text index '%s' is damaged; make it again", saved.folder)
            except (ValueError, OSError) as error:  # In a read-only folder, it cannot lock a file.
                log.debug("the full-text index '%s' cannot be used: %s", saved.folder, error)

    def catch_up(self, documents: DocumentTable, alive: Mask) -> None:
        """Add the missing documents of those with a number in ``alive``.

        Raises:
            RagDemoError: It cannot be written; for example, the disk is full.
        """
        import tantivy

        if self.end >= len(alive):  # Do not wait for another thread that adds later documents.
            return
        with self._lock:
            if self.end >= len(alive):
                return
            own, self._own = self._own, None  # After an error it is made again.
            try:
                start = self.end
                if own is None or self._process != os.getpid():
                    self._remove()
                    made, self._process = tempfile.mkdtemp(prefix="rag-demo-"), os.getpid()
                    self._remove = weakref.finalize(self, _remove_own, made, self._process)
                    own = Path(made, "words")
                    start = copy_words(self._saved, own)
                index = _opened(own)
                writer = index.writer(_MEMORY_BYTES, 1)
                for number, each in documents.stream(alive, start):
                    fields = {
                        "words": " ".join(stems_of(titled(each), self.language)),
                        "number": number,
                    }
                    writer.add_document(tantivy.Document.from_dict(fields, _schema()))
                writer.commit()
                writer.wait_merging_threads()  # It ends: a forked child must not inherit one.
                index.reload()
            except (ValueError, OSError) as error:
                raise RagDemoError(f"the full-text index cannot be written: {error}") from None
            self._index, self._own, self.end = index, own, len(alive)

    def save(self, folder: Path) -> WordsFolder | None:
        """Write a copy into a folder. None if there is nothing, or the saved folder is damaged.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            known = self._saved
            if self._own is not None and self._process == os.getpid():
                known = WordsFolder(self._own, self.end, checksum_of(self._own))
            return known and known._replace(folder=folder, end=copy_words(known, folder))

    def search(self, query: str, counts: Mask, top_k: int) -> tuple[Rows, npt.NDArray[np.float64]]:
        """Find the documents that have words of a query.

        Args:
            query: The query.
            counts: Whether each document number counts: shape (numbers,).
            top_k: How many to find; all that tie with the last one are found too.

        Returns:
            Document numbers and scores, in no order: shape (n,) each.
        """
        import tantivy

        terms = []
        for stem, count in query_terms(query, self.language).items():
            term = tantivy.Query.term_query(_schema(), "words", stem, "freq")
            term = tantivy.Query.boost_query(term, count) if count > 1 else term
            terms.append((tantivy.Occur.Should, term))
        parsed, searcher = tantivy.Query.boolean_query(terms), self._index.searcher()
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

    def close(self) -> None:
        """Forget the index, and remove the temporary folder."""
        with self._lock:
            self._remove()
            self._saved = self._index = self._own = None
            self.end = 0


def _remove_own(folder: str, process: int) -> None:
    if process == os.getpid():  # A forked child leaves it to its parent.
        shutil.rmtree(folder, ignore_errors=True)


def stems_of(text: str, language: str, *, is_query: bool = False) -> list[str]:
    """Return the stems of a text's words.

    Args:
        text: The text.
        language: A language of PyStemmer, or "none" for the words as they are.
        is_query: See `rag_demo.stores.words.tokenize`.
    """
    # Line by line: a character that is not ASCII makes the rest of its line slow.
    words = [word for line in text.splitlines() for word in tokenize(line, is_query=is_query)]
    if language == "none":
        return words
    stop_words, stem = STOP_WORDS if language == "english" else frozenset(), _stemmer(language)
    return [stem(word) for word in words if word not in stop_words]


def query_terms(query: str, language: str) -> Counter[str]:
    """Return the stems of a query, the first `_MOST_TERMS` different ones, with their counts."""
    stems = Counter(stems_of(query, language, is_query=True))
    return Counter(dict(itertools.islice(stems.items(), _MOST_TERMS)))


def best_span(
    query: str, text: str, spans: Sequence[Sequence[int]], language: str
) -> tuple[int, int] | None:
    """Return the passage with most words of a query; None without passages."""
    words = query_terms(query, language)
    counts = [sum(stem in words for stem in stems_of(text[a:b], language)) for a, b in spans]
    start, stop = spans[int(np.argmax(counts))] if spans else (0, 0)
    return (start, stop) if stop else None


@cache
def _stemmer(language: str) -> Any:
    import Stemmer

    return lru_cache(maxsize=1 << 16)(Stemmer.Stemmer(language, 0).stemWord)


def check_language(language: object) -> None:
    """Check a language of stems.

    Raises:
        InvalidValueError: PyStemmer does not have it.
    """
    import Stemmer

    if language not in (known := ["none", *Stemmer.algorithms()]):
        one_of = ", ".join(known)
        raise InvalidValueError(f"language must be one of {one_of}, got {short_repr(language)}")


@cache
def _schema() -> Any:
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    return builder.build()
