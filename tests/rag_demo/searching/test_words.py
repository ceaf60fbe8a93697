"""Search by words: scores are those of bm25s, and what people look for is found."""

from __future__ import annotations

import random
from typing import Any

import bm25s
import numpy as np
import pytest
from collections_of import Hashed
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo import PyTorchGPURetriever
from rag_demo.documents.document import Document, Documents
from rag_demo.searching.tokens import STOP_WORDS, words_of
from rag_demo.searching.words import Words

VOCABULARY = ["run", "parks", "memory", "cached", "tensors", "gradient", "the", "of", "c", "gpu"]


def table(texts: list[str]) -> Documents:
    return Documents().extended(Document(str(n), text, {}) for n, text in enumerate(texts))


def all_words(text: str, **options: Any) -> list[str]:
    return [word for words in words_of(text, **options) for word in words]


@given(st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=90), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_scores_are_those_of_bm25s(texts: list[list[str]]) -> None:
    """Of a plain index, whatever was added and deleted to get there."""
    import Stemmer

    stem = Stemmer.Stemmer("english").stemWord
    cut = [[stem(word) for word in text if word not in STOP_WORDS] for text in texts]
    query = "running cache c c"
    words, alive = Words(), np.ones(len(texts) + 1, bool)
    start = table(["memory run c gone", *map(" ".join, texts[: len(texts) // 2])])
    words.search(query, start, None)
    everything = start.extended(
        Document(str(n), " ".join(text), {}) for n, text in enumerate(texts[len(texts) // 2 :])
    )
    alive[0] = False
    numbers, scores = words.search(query, everything, alive)
    found = np.zeros(len(texts))
    found[numbers - 1] = scores
    if any(cut):
        index = bm25s.BM25(k1=1.5, b=0.75)
        index.index(cut, show_progress=False)
        known = [word for word in ("run", "cach", "c", "c") if word in index.vocab_dict]
        expected = index.get_scores(known) if known else np.zeros(len(texts))
        assert found == pytest.approx(expected, rel=1e-5)
    kept = words.kept(np.flatnonzero(alive), everything)
    again = kept.search(query, everything.kept(np.flatnonzero(alive)), None)
    assert (again[0] + 1).tolist() == numbers.tolist()
    assert again[1].tolist() == scores.tolist()


def test_kept_arrays() -> None:
    """What was kept gives the same scores, and is added to."""
    chance = random.Random(2)
    texts = [" ".join(chance.choices(VOCABULARY, k=chance.randrange(200))) for _ in range(40)]
    first = Words()
    arrays = first.derived(table(texts))
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    second = Words(arrays)
    longer = table([*texts, "a cached gpu"])
    for documents in (table(texts), longer):
        ours, theirs = (each.search("gpu cache", documents, None) for each in (first, second))
        assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]
    assert 40 in theirs[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The C language", ["the", "c", "language"]),
        ("C++ and C#; g++", ["c++", "and", "c#", "g++"]),
        ("Notepad++", ["notepad++", "notepad"]),
        ("don't, it's, o'clock", ["don", "it", "o", "clock"]),
        ("Port 8443", ["port", "8443"]),
        ("Café \uff23\uff55\uff44\uff41", ["café", "cuda"]),
        ("日本語C++", ["日本", "本語", "日", "本", "語", "c++"]),
        ("猫", ["猫"]),
        ("x" * 200, ["x" * 64]),
    ],
)
def test_what_a_word_is(text: str, words: list[str]) -> None:
    """One letter too, names of languages, numbers, and characters of CJK with their neighbours."""
    assert all_words(text) == words


def test_long_texts_are_cut_between_words() -> None:
    """Into pieces, none of which is all of it; nothing is lost."""
    text = "word " * 500_000
    pieces = list(words_of(text))
    assert len(pieces) > 2
    assert sum(map(len, pieces)) == 500_000
    assert {word for words in pieces for word in words} == {"word"}


FOUND = {
    "C": "The C programming language",
    "C++": "Templates of C++ are checked late",
    "8443": "## Port\n\n8443",
    "东京": "我住在东京都。",
    "記憶": "計算機の記憶装置について",
    "猫": "吾輩は猫である",
    "검색": "문서를 검색한다",
}


@pytest.mark.parametrize("query", FOUND)
def test_what_people_look_for(query: str) -> None:
    """Among all the others it comes first; by words cut as before it is not found."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(list(FOUND.values()), ids=list(FOUND))
        assert retriever.search(query, mode="bm25")[0].id == query
    before = bm25s.tokenize(
        [query, FOUND[query]], return_ids=False, show_progress=False, stopwords="en"
    )
    assert query == "8443" or not set(before[0]) & set(before[1])


def test_ties_go_by_id() -> None:
    """By words and by both, whatever the order of adding, and after a load and a change."""
    ids = [f"{n:03}" for n in range(150)]
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["same words"] * 150, ids=ids[::-1])
        for mode in ("bm25", "hybrid"):
            assert [r.id for r in retriever.search("words", 3, mode=mode)] == ids[:3]
        retriever.delete(["001"])
        retriever.add(["same words"], ids=["000a"])
        for mode in ("dense", "bm25", "hybrid"):
            assert [r.id for r in retriever.search("same words", 3, mode=mode)] == [
                "000",
                "000a",
                "002",
            ]
