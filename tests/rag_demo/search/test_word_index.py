"""Full-text search by BM25, and the fusion of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rag_demo import PyTorchGPURetriever
from tests.support.small_collections import Hashed, text_of

QUERY = "running cache c c"


def scores(retriever: Any) -> dict[str, float]:
    return {each.id: each.score for each in retriever.search(QUERY, 100, mode="bm25")}


def test_scores_are_bm25_scores() -> None:
    """With k1 = 1.2 and b = 0.75; lengths of up to 40 words are exact."""
    texts = ["run", "cached run", "c", "parks memory", "run run cached gpu", "c c tensors", "gpu"]
    lengths = [len(text.split()) for text in texts]
    expected: dict[str, float] = {}
    for word in ("run", "cached", "c", "c"):  # A word of the question counts each time.
        counts = [text.split().count(word) for text in texts]
        having = sum(map(bool, counts))
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = 1.2 * (0.25 + 0.75 * length * len(texts) / sum(lengths))
            if count:
                score = weight * 2.2 * count / (count + norm)
                expected[str(number)] = expected.get(str(number), 0) + score
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(texts)
        assert scores(retriever) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("query", "other"),
    [
        ("C", "C++ and C#; g++"),
        ("C++", "The C language, or Notepad++"),
        ("c#", "The C language, and C++"),
        ("notepad", "note pad"),
        ("don", "it's"),
        ("日本", "本日"),
        ("हिन्दी", "हन्द"),
        ("istanbul", "i stanbul"),
        ("x" * 64, "x" * 63),
    ],
)
def test_similar_words_are_distinguished(query: str, other: str) -> None:
    """Words of more than 64 letters are cut off."""
    own = {"notepad": "Notepad++", "don": "don't", "日本": "日本語C++", "x" * 64: "x" * 200,
           "हिन्दी": "हिन्दी"}  # fmt: skip
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([own.get(query, f"a {query} b"), other], ids=["own", "other"])
        assert [each.id for each in retriever.search(query, mode="bm25")] == ["own"]


FOUND = {
    "C": "The C programming language",
    "C++": "Templates of C++ are checked late",
    "8443": "## Port\n\n8443",
    "Notepad": "An editor: Notepad++",
    "cuda": "Cafe \uff23\uff35\uff24\uff21",
    "clock": "o'clock",
    "东京": "我住在东京都。",
    "記憶": "計算機の記憶装置について",
    "猫": "吾輩は猫である",
    "검색": "문서를 검색한다",
    "हिन्दी": "भारत की भाषा हिन्दी है",
    "বাংলা": "আমি বাংলা বলি",
    "தமிழ்": "நான் தமிழ் பேசுகிறேன்",
    "ภาษาไทย": "ฉันพูดภาษาไทยได้",
    "שלום": "שָׁלוֹם עֲלֵיכֶם",
    "istanbul": "in \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}stanbul",
}


@pytest.mark.parametrize("query", FOUND)
def test_words_of_any_script_are_found(query: str) -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(list(FOUND.values()), ids=list(FOUND))
        assert retriever.search(query, mode="bm25")[0].id == query


@pytest.mark.parametrize("query", ["of the", "in a"])
def test_hybrid_search_for_stop_words_alone_is_dense_search(query: str) -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([f"{text_of(n)} {'in' if n % 7 else 'gradient'} the" for n in range(60)])

        def ids(query: str, mode: str) -> list[str]:
            return [each.id for each in retriever.search(query, 20, mode=mode)]

        assert ids(query, "hybrid") == ids(query, "dense")
        assert ids(f"{query} gradient", "hybrid") != ids(f"{query} gradient", "dense")


def test_stems_are_those_of_the_language(tmp_path: Path) -> None:
    """The index records the language, and a loaded index keeps it."""
    with PyTorchGPURetriever(Hashed(), device="cpu", language="german") as retriever:
        retriever.add(["Die Häuser der Stadt", "the rivers"], ids=["de", "en"])
        retriever.save(tmp_path / "i")
    with PyTorchGPURetriever(Hashed(), device="cpu") as loaded:
        loaded.load(tmp_path / "i")
        loaded.add(["Kleine Gärten"], ids=["more"])
        assert [each.id for each in loaded.search("Haus", mode="bm25")] == ["de"]
        assert [each.id for each in loaded.search("Garten", mode="bm25")] == ["more"]
        assert [each.id for each in loaded.search("the", mode="bm25")] == ["en"]
    with PyTorchGPURetriever(Hashed(), device="cpu", language="none") as words:
        words.add(["caches"], ids=["a"])
        assert words.search("cache", mode="bm25") == []
        assert len(words.search("caches", mode="bm25")) == 1
    with pytest.raises(ValueError, match="language must be"):
        PyTorchGPURetriever(Hashed(), device="cpu", language="klingon")
