"""Tokens of the full-text index: words of any script, names such as C++, pairs of characters.

Chinese, Japanese, Thai, Lao, Khmer and Burmese have no spaces between words. So their texts are
indexed by characters and by pairs of neighbours, as Lucene's CJKAnalyzer does, and queries are
cut into pairs. Words of other scripts keep their combining marks, such as the vowels of Hindi. The
points of Hebrew and Arabic are left out, because most texts omit them. Time is linear in the text.
"""

from __future__ import annotations

import operator
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache

# Lucene's English stop words.
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

_PIECE = 1 << 20  # characters that are processed together
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


def tokenize(text: str, *, is_query: bool = False) -> Iterator[list[str]]:
    """Yield lists of the words of a text, in lower case and with stop words."""
    for start, stop in _pieces(text):
        piece = text[start:stop]
        is_ascii = piece.isascii()
        if not is_ascii:
            piece = unicodedata.normalize("NFKC", piece).replace("\u2019", "'")
        piece = piece.lower()
        if not is_ascii:
            piece = _LEFT_OUT.sub("", piece)
        if "'" in piece:
            piece = _CONTRACTION.sub(" ", piece)
        words: list[str] = (_ASCII_WORD if is_ascii else _word()).findall(piece)
        if not is_ascii:
            words = [each for word in words for each in _of_run(word, is_query)]
        if any(len(word) > _LONGEST or word.endswith("++") for word in words):
            words = [each for word in words for each in _split(word)]
        yield words


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


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Cut a text between words where that is possible."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind(" ", start + _PIECE // 2, start + _PIECE) + 1 or start + _PIECE
        yield start, stop
        start = stop
    yield start, len(text)
