"""Search by words, and by words and vectors: BM25, words of any script, and stems."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.rag_demo.search.reference import GivenVectors, normal
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, text_of

COUNT = 400
MODEL = GivenVectors(normal(COUNT, 8), normal(4, 8, seed=1))


def texts() -> dict[str, str]:
    """Return texts by id; each begins with the number of its vector."""
    chance = random.Random(6)
    words = ["gradient", "parks", "tensor", "cuda", "heap", *["memory", "cache"] * 8]
    drawn = (" ".join(chance.choices(words, k=chance.randrange(9))) for _ in range(COUNT))
    return {f"d{number:04}": f"{number} {text}" for number, text in enumerate(drawn)}


def ids(retriever: Any, query: str, top_k: int = COUNT, **options: Any) -> list[str]:
    results = retriever.search(query, top_k, **{"mode": "bm25", **options})
    return [result.id for result in results]


def test_words_find_the_documents_that_have_them(tmp_path: Path) -> None:
    """All of these and no others, the best first, ties by id; after changes and saving too."""
    now = texts()

    def check() -> None:
        for query, words in (("gradients", {"gradient"}), ("tensor heap", {"tensor", "heap"})):
            results = retriever.search(query, COUNT, mode="bm25")
            expected = {name: text for name, text in now.items() if words & set(text.split())}
            assert {result.id: result.text for result in results} == expected
            assert len(results) == len(expected)
            order = [(-result.score, result.id) for result in results]
            assert order == sorted(order)
            assert all(result.score > 0 for result in results)

    with OnCpu(MODEL) as retriever:
        retriever.add([*now.values()], ids=[*now])
        check()
        gone = sorted(now)[::3]
        retriever.delete(gone)
        now = {name: text for name, text in now.items() if name not in gone}
        check()
        retriever.add(["7 a gradient"], ids=["d0001"])
        now["d0001"] = "7 a gradient"
        check()
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        check()


@pytest.mark.parametrize("mode", ["bm25", "hybrid"])
def test_top_k_and_min_score_cut_off_the_results(mode: str) -> None:
    with OnCpu(MODEL) as retriever:
        retriever.add([*texts().values()])
        query = "1 gradient heap"
        everything = retriever.search(query, 100, mode=mode)
        assert retriever.search(query, 7, mode=mode) == everything[:7]
        bar = everything[20].score
        above = retriever.search(query, 100, min_score=bar, mode=mode)
        assert above == [result for result in everything if result.score >= bar]


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
    with OnCpu(Hashed()) as retriever:
        retriever.add(texts)
        results = retriever.search("running cache c c", mode="bm25", top_k=100)
        assert {each.id: each.score for each in results} == pytest.approx(expected, rel=1e-5)


# A query, a text that has it, and one that has something similar. Long words are cut off.
FOUND = [
    ("C", "The C programming language", "C++ and C#; g++"),
    ("C++", "Templates of C++ are checked late", "The C language, or Notepad++"),
    ("c#", "a c# b", "The C language, and C++"),
    ("Notepad", "An editor: Notepad++", "note pad"),
    ("don", "don't", "it's"),
    ("8443", "## Port\n\n8443", "## Port\n\n844"),
    ("cuda", "Cafe \uff23\uff35\uff24\uff21", "cud"),
    ("needle", "word " * 50_000 + "needle", "word"),
    ("x" * 64, "x" * 200, "x" * 63),
    ("日本", "日本語C++", "本日"),
    ("記憶", "計算機の記憶装置について", "憶記"),
    ("猫", "吾輩は猫である", "犬"),
    ("검색", "문서를 검색한다", "문서"),
    ("हिन्दी", "भारत की भाषा हिन्दी है", "हन्द"),
    ("বাংলা", "আমি বাংলা বলি", "আমি"),
    ("தமிழ்", "நான் தமிழ் பேசுகிறேன்", "நான்"),
    ("ภาษาไทย", "ฉันพูดภาษาไทยได้", "ฉัน"),
    ("שלום", "שָׁלוֹם עֲלֵיכֶם", "עֲלֵיכֶם"),
    ("istanbul", "in \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}stanbul", "i stanbul"),
    ("empty cache", "call safe_cuda_empty_cache() now", "call it now"),
    ("user name", "getUserName returns it", "it returns"),
    ("getUserName", "call getusername", "call it"),
    ("http server", "an HTTPServer of the library", "the library"),
    ("cafe", "Le café est fermé", "caf"),
    ("café", "a cafe in the street", "caf"),
    ("strasse", "Die Straße ist gesperrt", "stras"),
    ("lodz", "Łódź is a city", "a city"),
    ("елка", "ёлка", "елк"),
]


def test_words_of_any_script_are_found_and_similar_ones_are_not() -> None:
    """Parts of identifiers and words without accents are found too, but not by their stems."""
    with OnCpu(Hashed(), language="none") as retriever:
        for query, own, other in FOUND:
            retriever.add([own, other], [{"query": query}] * 2, [f"own {query}", f"other {query}"])
        for query, _, _ in FOUND:
            assert ids(retriever, query, where={"query": query}) == [f"own {query}"]


def test_headings_above_a_passage_are_searched() -> None:
    titles = {"linux": "Guide > Linux > Install", "windows": "Guide > Windows > Install"}
    metadata = [{"title": title} for title in titles.values()]
    with OnCpu(Hashed()) as retriever:
        retriever.add(["Install\nRun the program."] * 2, metadata, [*titles])
        for name in titles:
            assert ids(retriever, f"install on {name}")[0] == name


def test_hybrid_search_for_stop_words_alone_is_dense_search() -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add([f"{text_of(n)} {'in' if n % 7 else 'gradient'} the" for n in range(60)])
        for query in ("of the", "in a", "of the gradient"):
            hybrid, dense = (ids(retriever, query, 20, mode=mode) for mode in ("hybrid", "dense"))
            assert (hybrid == dense) == ("gradient" not in query)


def test_stems_are_those_of_the_language(tmp_path: Path) -> None:
    """The index records the language, and a loaded index keeps it."""
    with OnCpu(Hashed(), language="german") as retriever:
        retriever.add(["Die Häuser der Stadt", "the rivers"], ids=["de", "en"])
        retriever.save(tmp_path / "i")
    with OnCpu(Hashed()) as loaded:
        loaded.load(tmp_path / "i")
        loaded.add(["Kleine Gärten"], ids=["more"])
        for query, name in (("Haus", "de"), ("Garten", "more"), ("the", "en")):
            assert ids(loaded, query) == [name]
    with OnCpu(Hashed(), language="none") as words:
        words.add(["caches"], ids=["a"])
        assert (ids(words, "cache"), ids(words, "caches")) == ([], ["a"])
    with pytest.raises(ValueError, match="language must be") as error:
        OnCpu(Hashed(), language="klingon")
    assert not hasattr(error.value, "__notes__"), "the half-built retriever was not closed"
