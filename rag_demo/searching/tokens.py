"""Text into what is looked for: words of any script, names such as C++, pairs of CJK characters.

Chinese and Japanese have no spaces between words, so their texts are indexed by single characters
and by pairs of neighbours, as Lucene's CJKAnalyzer does it, and asked for by pairs. Time is
linear in the text, and what is in memory at once is a piece of it.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Iterator, Sequence

__all__ = ["STOP_WORDS", "words_of"]

# Lucene's English ones.
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

_PIECE = 1 << 20  # characters that are looked at together
_LONGEST = 64  # characters of a word; of longer ones these are the word
_CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
# A word; C++, g++, C#, F#.
_ASCII_WORD = re.compile(r"\w+(?:\+\+(?!\w)|(?<=\b\w)#(?!\w))?")
_LETTER = rf"[^\W{_CJK}]"
_WORD = re.compile(rf"[{_CJK}]+|{_LETTER}+(?:\+\+(?!{_LETTER})|(?<=\b\w)#(?!{_LETTER}))?")
_CONTRACTION = re.compile(r"(?<=\w)'(?:s|t|m|d|re|ve|ll)\b")
_IS_CJK = re.compile(f"[{_CJK}]").match


def words_of(text: str, *, is_query: bool = False) -> Iterator[list[str]]:
    """Yield the words of a text in lower case, piece by piece; stop words are among them."""
    for start, stop in _pieces(text):
        piece = text[start:stop]
        is_ascii = piece.isascii()
        if not is_ascii:
            piece = unicodedata.normalize("NFKC", piece).replace("\u2019", "'")
        piece = piece.lower()
        if "'" in piece:
            piece = _CONTRACTION.sub(" ", piece)
        words: list[str] = (_ASCII_WORD if is_ascii else _WORD).findall(piece)
        if not is_ascii:
            words = [each for word in words for each in _of_cjk(word, is_query)]
        if any(len(word) > _LONGEST or word.endswith("++") for word in words):
            words = [each for word in words for each in _split(word)]
        yield words


def _of_cjk(run: str, is_query: bool) -> Sequence[str]:
    if not _IS_CJK(run):
        return (run,)
    pairs = list(map(operator.add, run, run[1:]))
    return pairs if is_query and pairs else [*pairs, *run]


def _split(word: str) -> tuple[str, ...]:
    word = word[:_LONGEST]
    name = word.rstrip("+")
    # Who asks for Notepad finds Notepad++; but C is another language than C++.
    return (word, name) if word.endswith("++") and len(name) > 1 else (word,)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Cut between words, if there is a place for it."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind(" ", start + _PIECE // 2, start + _PIECE) + 1 or start + _PIECE
        yield start, stop
        start = stop
    yield start, len(text)
