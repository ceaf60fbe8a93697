"""Search by words, and by words and vectors: BM25, words of any script, and stems."""

import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever
from tests.rag_demo.search.reference import GivenVectors
from tests.support.small_collections import Hashed, text_of

KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]
RARE = ["gradient", "parks", "tensor", "cuda", "heap"]
COUNT = 1_200


class Vectors(GivenVectors):
    """Texts and queries begin with the number of their vector."""

    def __init__(self) -> None:
        chance = np.random.default_rng(4)
        super().__init__(chance.standard_normal((COUNT, 8)), chance.standard_normal((4, 8)))


def texts() -> list[str]:
    chance = random.Random(6)
    words = [*RARE, *["memory", "cache"] * 8]
    return [f"{n} {' '.join(chance.choices(words, k=chance.randrange(9)))}" for n in range(COUNT)]


def filled(kind: Any) -> Any:
    retriever = kind(Vectors())
    names = [f"d{number:04}" for number in range(COUNT)]
    retriever.add(texts(), [{"even": n % 2 == 0} for n in range(COUNT)], names)
    return retriever


def ids(results: Any) -> list[str]:
    return [result.id for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_words_find_the_documents_that_have_them(kind: Any, tmp_path: Path) -> None:
    """All of these and no others, the best first, ties by id; after changes and saving too."""
    with filled(kind) as retriever:
        now = dict(zip((f"d{number:04}" for number in range(COUNT)), texts(), strict=True))
        for change in ("none", "delete", "replace", "save"):
            if change == "delete":
                gone = sorted(now)[::3]
                retriever.delete(gone)
                now = {name: text for name, text in now.items() if name not in gone}
            elif change == "replace":
                retriever.add(["7 a gradient"], [{"even": True}], ["d0001"])
                now["d0001"] = "7 a gradient"
            elif change == "save":
                retriever.save(tmp_path / "index")
                retriever.load(tmp_path / "index")
            for query in ("gradients", "tensor heap", "nobody"):
                wanted = {"gradients": {"gradient"}, "tensor heap": {"tensor", "heap"}}
                expected = {
                    name
                    for name, text in now.items()
                    if wanted.get(query, {query}) & set(text.split())
                }
                results = retriever.search(query, COUNT, mode="bm25")
                assert set(ids(results)) == expected
                assert len(results) == len(expected)
                assert all(now[result.id] == result.text for result in results)
                order = [(-result.score, result.id) for result in results]
                assert order == sorted(order)
                assert all(result.score > 0 for result in results)


@pytest.mark.parametrize("mode", ["bm25", "hybrid"])
def test_options_are_those_of_dense_search(mode: str) -> None:
    with filled(PyTorchGPURetriever) as retriever:
        query = "1 gradient heap"
        everything = retriever.search(query, 100, mode=mode)
        assert [result.rank for result in everything] == list(range(1, len(everything) + 1))
        assert ids(retriever.search(query, 7, mode=mode)) == ids(everything[:7])
        bar = everything[20].score
        above = retriever.search(query, 100, min_score=bar, mode=mode)
        assert above == [result for result in everything if result.score >= bar]
        batch = retriever.search_batch([query, "2 memory", "3 of"], 5, mode=mode)
        assert batch == [
            retriever.search(each, 5, mode=mode) for each in (query, "2 memory", "3 of")
        ]
        even = retriever.search(query, 30, where={"even": True}, mode=mode)
        assert len(even) == 30
        assert all(result.metadata["even"] for result in even)


def test_the_end_of_a_long_text_is_found() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["word " * 210_000 + "needle", "a needle in the hay"])
        assert {result.id for result in retriever.search("needle", mode="bm25")} == {"0", "1"}


SCORED = "running cache c c"


def scores_of(retriever: Any) -> dict[str, float]:
    return {each.id: each.score for each in retriever.search(SCORED, 100, mode="bm25")}


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
        assert scores_of(retriever) == pytest.approx(expected, rel=1e-5)


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
    own = {
        "notepad": "Notepad++",
        "don": "don't",
        "日本": "日本語C++",
        "x" * 64: "x" * 200,
        "हिन्दी": "हिन्दी",
    }
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


def test_words_of_any_script_are_found() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(list(FOUND.values()), ids=list(FOUND))
        first = {query: retriever.search(query, mode="bm25")[0].id for query in FOUND}
        assert first == {query: query for query in FOUND}


PARTS = {
    "empty cache": "call safe_cuda_empty_cache() now",
    "user name": "getUserName returns it",
    "getUserName": "call getusername",
    "http server": "an HTTPServer of the library",
    "cafe": "Le café est fermé",
    "café": "a cafe in the street",
    "strasse": "Die Straße ist gesperrt",
    "lodz": "Łódź is a city",
    "елка": "ёлка",
}


@pytest.mark.parametrize("query", PARTS)
def test_parts_of_identifiers_and_words_without_accents_are_found(query: str) -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu", language="none") as retriever:
        retriever.add([PARTS[query], "something else"], ids=["own", "other"])
        assert [each.id for each in retriever.search(query, mode="bm25")] == ["own"]


def test_headings_above_a_passage_are_searched() -> None:
    titles = ["Guide > Linux > Install", "Guide > Windows > Install"]
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(
            ["Install\nRun the program.", "Install\nRun the program."],
            [{"title": title} for title in titles],
            ["linux", "windows"],
        )
        for name in ("linux", "windows"):
            assert retriever.search(f"install on {name}", mode="bm25")[0].id == name


def test_hybrid_search_for_stop_words_alone_is_dense_search() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([f"{text_of(n)} {'in' if n % 7 else 'gradient'} the" for n in range(60)])

        def ids(query: str, mode: str) -> list[str]:
            return [each.id for each in retriever.search(query, 20, mode=mode)]

        for query in ("of the", "in a"):
            assert ids(query, "hybrid") == ids(query, "dense")
            assert ids(f"{query} gradient", "hybrid") != ids(f"{query} gradient", "dense")


def test_change_adds_words_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a search that uses words; until then, the next one adds them."""
    from rag_demo.stores import words

    threads: list[int] = []

    def stems_of(text: str, language: str, *, is_query: bool = False) -> Any:
        threads.extend([threading.get_ident()] * (text.startswith("new") and not is_query))
        return true(text, language, is_query=is_query)

    true = words.stems_of
    monkeypatch.setattr(words, "stems_of", stems_of)
    with FaissRetriever(Hashed()) as retriever:
        retriever.add(["old"], ids=["old"])
        for name in ("a", "b"):
            retriever.search("old", mode="bm25")
            change = threading.Thread(target=retriever.add, args=([f"new {name}"],))
            change.start()
            change.join()
            assert threads == [change.ident]
            threads.clear()
        assert len(retriever.search("new", mode="bm25")) == 2
        retriever.add(["new c"])
        retriever.add(["new d"])
        assert len(threads) == 1, "the second change was not preceded by a search"
        assert len(retriever.search("new", mode="bm25")) == 4


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
    for kind in (FaissRetriever, PyTorchGPURetriever):
        with pytest.raises(ValueError, match="language must be") as error:
            kind(Hashed(), language="klingon")
        assert not hasattr(error.value, "__notes__"), "the half-built retriever was not closed"
