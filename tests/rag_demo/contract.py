"""What every retriever and every store must do: a suite for the authors of stores.

A `Place` says how retrievers of one kind are opened and kept. `tests/rag_demo/test_contract.py`
calls each function of `CHECKS` with an empty place of each kind.
"""

import datetime
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from rag_demo import (
    Document,
    EmbeddedBatch,
    IndexChangedError,
    ModelIdentity,
    ModelMismatchError,
    Retriever,
    embed,
)
from rag_demo.search_request import RANK_CONSTANT
from tests.support.programs import assert_clean, run_forked
from tests.support.small_collections import DIMENSION, Hashed, are_nearest, text_of, vector_of
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for
from tests.support.zygotes import ZYGOTES
from torch_utils import ResourceClosedError

MODES = ("dense", "bm25", "hybrid")
QUERY = "golf echo"
DOCUMENTS = {f"d{n:02}": f"{text_of(n)} number{n}" for n in range(40)}
METADATA = {
    name: {"n": n, "even": n % 2 == 0, "tags": [text_of(n), n], "of": {"deep": [n, {"x": n}]}}
    for n, name in enumerate(DOCUMENTS)
}


class Silent(Hashed):
    """The same model, which cannot answer."""

    def embed_documents(self, texts: Any) -> Any:
        raise AssertionError("the model was called")


class Place(Protocol):
    """A place that can hold one index; empty at first."""

    source: str
    """Python source that defines this place as ``place``, for another process."""
    keeps_nul: bool
    """Whether texts may contain NUL. If not, they are refused."""

    def open(self, model: Any) -> Retriever:
        """Return a retriever with what the place holds."""

    def keep(self, retriever: Any) -> None:
        """Make the changes of a retriever durable."""


def add(retriever: Any, names: Any = DOCUMENTS) -> None:
    retriever.add(
        [DOCUMENTS[name] for name in names], [METADATA[name] for name in names], list(names)
    )


def fill(place: Place) -> None:
    """Put DOCUMENTS into a place."""
    with place.open(Hashed()) as retriever:
        add(retriever)
        place.keep(retriever)


def found(retriever: Any, query: str = QUERY, **options: Any) -> list[str]:
    return [each.id for each in retriever.search(query, 1_000, **{"mode": "dense", **options})]


def check_answers_are_exact_and_ties_ordered_by_id(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever, list(DOCUMENTS)[::-1])
        assert are_nearest(retriever.search(QUERY, 9, mode="dense"), DOCUMENTS, QUERY, 9)
        same = ["tie9", "tie1", "tie5"]
        retriever.add(["the same text"] * 3, ids=same)
        for mode in MODES:
            best = retriever.search("the same text", 3, mode=mode)
            assert [each.id for each in best] == sorted(same), mode
            assert [each.rank for each in best] == [1, 2, 3]
        batch = retriever.search_batch([QUERY, "delta"], 5, mode="hybrid")
        assert batch == [retriever.search(query, 5, mode="hybrid") for query in (QUERY, "delta")]
        assert len(retriever.search(QUERY, min_score=0.5, mode="dense")) < len(retriever)
        huge = " ".join(["number7"] * 50 + [f"unknown{n}" for n in range(20_000)])
        assert retriever.search(huge, 1, mode="bm25")[0].id == "d07"


def check_documents_come_back_as_they_were(place: Place) -> None:
    strange = {
        "emoji \U0001f600": "caf\u00e9 \u4f60\u597d \U0001f600",
        "line\u2028break\n": "\u202ereversed\x00null",
        "": "an empty id",
        "'; DROP TABLE documents; --": "quotes ' \" ` %s {} \\",
    }
    with place.open(Hashed()) as retriever:
        if not place.keeps_nul:
            for texts, names in ((["ok", "a\0b"], ["1", "2"]), (["", ""], ["ok", "\0"])):
                with pytest.raises(ValueError, match="NUL"):
                    retriever.add(texts, ids=names)
            assert len(retriever) == 0
            strange = {name: text.replace("\0", "") for name, text in strange.items()}
        retriever.add(
            list(strange.values()), [{"\u00e9'": text} for text in strange.values()], list(strange)
        )
        add(retriever)
        place.keep(retriever)
    expected: dict[str, tuple[str, Any]] = {
        name: (text, {"\u00e9'": text}) for name, text in strange.items()
    }
    expected |= {name: (text, METADATA[name]) for name, text in DOCUMENTS.items()}
    with place.open(Hashed()) as retriever:
        found = {each.id: (each.text, each.metadata) for each in retriever.documents(limit=99)}
        assert found == expected
        assert set(retriever.ids()) == expected.keys()
        assert retriever.get(["unknown", "d07"]) == [None, Document("d07", *expected["d07"])]
        for name, text in strange.items():
            (best,) = retriever.search(text, 1, where={"\u00e9'": text})
            assert (best.id, best.text) == (name, text)


FILTERS: dict[str, tuple[Any, Callable[[int], bool]]] = {
    "equal": ({"n": 7}, lambda n: n == 7),
    "one of": ({"n": [7, 9, 400]}, lambda n: n in (7, 9)),
    "range": ({"n": {"$gte": 5, "$lt": 11}}, lambda n: 5 <= n < 11),
    "true is not 1": ({"even": 1}, lambda n: False),
    "contains": ({"tags": {"$contains": 3}}, lambda n: n == 3),
    "not": ({"$not": {"n": {"$gt": 4}}}, lambda n: n <= 4),
    "or": ({"$or": [{"n": 1}, {"even": True, "n": {"$lt": 5}}]}, lambda n: n in (0, 1, 2, 4)),
    "deep": ({"of": {"deep": [3, {"x": 3}]}}, lambda n: n == 3),
    "other key": ({"unknown": None}, lambda n: False),
    "nested": ({"of.deep": {"$contains": 3}}, lambda n: n == 3),
    "nested equal": ({"of.deep": {"$eq": [3.0, {"x": 3.0}]}}, lambda n: n == 3),
    "exists": ({"of.deep": {"$exists": True}}, lambda n: True),
    "is missing": ({"of.other": {"$exists": False}}, lambda n: True),
    "id": ({"$id": ["d03", "d05", "unknown"]}, lambda n: n in (3, 5)),
    "range of ids": ({"$id": {"$gte": "d05", "$lt": "d08"}}, lambda n: 5 <= n < 8),
    "part of an id": ({"$id": {"$contains": "7"}}, lambda n: "7" in f"d{n:02}"),
    "another id": ({"$id": {"$ne": "d03"}}, lambda n: n != 3),
    "scalar of numpy": ({"n": {"$lte": np.float32(2)}}, lambda n: n <= 2),
}


def check_filters_are_applied_inside_the_search(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever)
        for mode in MODES:
            every = set(found(retriever, mode=mode))
            for name, (where, fits) in FILTERS.items():
                wanted = {each for n, each in enumerate(DOCUMENTS) if fits(n)} & every
                assert set(found(retriever, mode=mode, where=where)) == wanted, (mode, name)
        assert len(retriever.search(QUERY, 3, where={"even": True})) == 3
        with pytest.raises(ValueError, match="regex"):
            retriever.search(QUERY, where={"n": {"$regex": "x"}})


def check_documents_are_paged_counted_and_deleted_by_filter(place: Place) -> None:
    where = {"even": True}
    with place.open(Hashed()) as retriever:
        add(retriever, list(DOCUMENTS)[::-1])
        add(retriever, ["d06", "d07"])
        wanted, pages, after = [f"d{n:02}" for n in range(0, 40, 2)], [], None
        while page := retriever.documents(where, after=after, limit=7):
            pages.append([each.id for each in page])
            after = page[-1].id
        assert [len(each) for each in pages] == [7, 7, 6]
        assert [name for page in pages for name in page] == wanted
        assert [each.id for each in retriever.documents(after="d37x")] == ["d38", "d39"]
        assert (retriever.count(where), retriever.count()) == (20, 40)
        assert retriever.delete(where=where) == 20
        assert retriever.delete(["d01"], where={"n": [1, 3]}) == 2
        assert retriever.delete(where={"evne": True}) == 0
        place.keep(retriever)
    with place.open(Hashed()) as retriever:
        assert [each.id for each in retriever.documents()] == [f"d{n:02}" for n in range(5, 40, 2)]


def check_dates_and_scalars_of_numpy_are_metadata(place: Place) -> None:
    days = [datetime.date(2026, 11, 28), datetime.date(2026, 2, 1)]
    facts = [{"day": day, "x": np.float32(2.5), "y": [np.int64(n)]} for n, day in enumerate(days)]
    with place.open(Hashed()) as retriever:
        retriever.add(["a", "b"], facts, ["a", "b"])
        place.keep(retriever)
    with place.open(Hashed()) as retriever:
        (document,) = retriever.documents({"day": {"$gt": datetime.date(2026, 3, 1)}})
        assert document.metadata == {"day": "2026-11-28", "x": 2.5, "y": [0]}
        assert retriever.count({"x": np.float64(2.5), "y": {"$contains": np.int8(1)}}) == 1
        with pytest.raises(TypeError, match="not a JSON value"):
            retriever.add(["c"], [{"x": object()}])


def check_chosen_ids_differ(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        retriever.add(["text"], ids=["1"])
        assert len({"1", *retriever.add(["a", "b"]), *retriever.add(["c"])}) == 4


def check_change_replaces_and_deletes(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever)
        retriever.add(["an entirely new text"], [{"n": 1000}], ["d03"])
        assert retriever.delete(["d04", "unknown", "d05"]) == 2
        place.keep(retriever)
        expected = [retriever.search(QUERY, 50, mode=mode) for mode in MODES]
    with place.open(Hashed()) as retriever:
        assert [retriever.search(QUERY, 50, mode=mode) for mode in MODES] == expected
        assert len(retriever) == len(DOCUMENTS) - 2
        assert retriever.search("an entirely new text", 1, mode="dense")[0].id == "d03"
        assert found(retriever, where={"n": 3}) == []
        assert found(retriever, where={"n": 1000}) == ["d03"]
        assert "d03" in found(retriever, "entirely", mode="bm25")
        assert "d03" not in found(retriever, "number3", mode="bm25")
        assert retriever.delete(list(retriever.ids())) == len(DOCUMENTS) - 2
        place.keep(retriever)
    with place.open(Hashed()) as retriever:
        assert found(retriever) == []


def check_metadata_change_embeds_nothing(place: Place) -> None:
    fill(place)
    with place.open(Hashed()) as retriever:
        expected = retriever.search(QUERY, 50, mode="dense")
        retriever.embedding_model = Silent()
        assert retriever.update_metadata(["d03", "unknown"], [{"n": 1000}, {}]) == 1
        retriever.embedding_model = Hashed()
        place.keep(retriever)
    with place.open(Hashed()) as retriever:
        again = retriever.search(QUERY, 50, mode="dense")
        for one, other in zip(again, expected, strict=True):
            assert (one.id, one.score) == (other.id, other.score)
        assert found(retriever, where={"n": 1000}) == ["d03"]
        assert found(retriever, where={"n": 3}) == []
        assert "d03" in found(retriever, "number3", mode="bm25")
        (document,) = retriever.get(["d03"])
        assert document == Document("d03", DOCUMENTS["d03"], {"n": 1000})


def check_refused_batch_changes_nothing(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever)
        expected = retriever.search(QUERY, 50)
        new = Document("new", "text", {})
        for documents in ([new], [Document("d00", "another text", {})]):
            with pytest.raises(ValueError, match="vectors"):
                retriever.store.upsert(EmbeddedBatch.without_vectors(documents))
        wide = np.ones((1, DIMENSION + 1), np.float32) / np.sqrt(np.float32(DIMENSION + 1))
        with pytest.raises(ValueError, match="dimension"):
            retriever.add(["wide"], ids=["d00"], vectors=wide)
        batch = embed([new], Hashed())
        with pytest.raises(ModelMismatchError):
            retriever.store.upsert(replace(batch, identity=ModelIdentity("another model")))
        assert retriever.search(QUERY, 50) == expected
        assert len(retriever) == len(DOCUMENTS)


def check_vectors_of_the_caller_are_used(place: Place) -> None:
    with place.open(Silent()) as retriever:
        vectors = np.stack([vector_of(text) for text in DOCUMENTS.values()])
        retriever.add(list(DOCUMENTS.values()), ids=list(DOCUMENTS), vectors=vectors)
        results = retriever.search(None, 9, vector=vector_of(QUERY))
        assert are_nearest(results, DOCUMENTS, QUERY, 9)
        assert retriever.search(QUERY, 9, mode="dense", vector=vector_of(QUERY)) == results


def check_hybrid_search_weighs_both_rankings(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever)
        ranks = {
            mode: {each.id: each.rank for each in retriever.search(QUERY, 100, mode=mode)}
            for mode in ("dense", "bm25")
        }
        for weights in ((1.0, 1.0), (3.0, 0.5), (1.0, 0.0), (0.0, 1.0)):
            scores: dict[str, float] = {}
            for mode, weight in zip(ranks, weights, strict=True):
                for name, rank in ranks[mode].items() if weight else ():
                    scores[name] = scores.get(name, 0.0) + weight / (RANK_CONSTANT + rank)
            best = sorted(scores, key=lambda name: (-scores[name], name))[:20]
            results = retriever.search(QUERY, 20, weights=weights)
            assert [each.id for each in results] == best, weights
            assert [each.score for each in results] == pytest.approx([scores[n] for n in best])


def check_results_tell_what_their_score_was_made_from(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        retriever.add([f"filler {n} of {text_of(n)}" for n in range(300)])
        add(retriever)
        long = " ".join(["something else"] * 200)
        retriever.add([f"{long} {QUERY} zebra {long}", "zebra"], ids=["long", "short"])
        for query in (QUERY, "zebra"):
            parts = {
                mode: {each.id: each for each in retriever.search(query, 1000, mode=mode)}
                for mode in ("dense", "bm25")
            }
            for mode, results in parts.items():
                assert all(each.scores == {mode: each.score} for each in results.values())
            for each in retriever.search(query, 20, weights=(0.1, 1.0)):
                assert each.scores == {
                    mode: found[each.id].score for mode, found in parts.items() if each.id in found
                }
                assert each.passage == parts["dense"][each.id].passage


def check_two_writers_lose_no_update(place: Place) -> None:
    """The second one gets an error, unless both changes are there."""
    fill(place)
    with place.open(Hashed()) as first, place.open(Hashed()) as second:
        first.add(["by the first"], ids=["first"])
        second.add(["by the second"], ids=["second"])
        place.keep(first)
        try:
            place.keep(second)
        except IndexChangedError:
            with place.open(Hashed()) as again:
                again.add(["by the second"], ids=["second"])
                place.keep(again)
    with place.open(Hashed()) as retriever:
        assert set(retriever.ids()) == {*DOCUMENTS, "first", "second"}


OTHER_PROCESS = """
import runpy, sys
contract = runpy.run_path(sys.argv[1])
exec(sys.argv[2])
with place.open(contract["Hashed"]()) as retriever:
    contract[sys.argv[3]](place, retriever)
"""


def change_once(place: Place, retriever: Any) -> None:
    retriever.add(["by another process"], [{"n": -1}], ["d00"])
    retriever.delete(["d01"])
    place.keep(retriever)


def check_change_by_another_process_mixes_nothing(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        add(retriever)
        place.keep(retriever)
        assert_clean(
            run_forked(OTHER_PROCESS, __file__, place.source, "change_once", quick_end=True)
        )
        results = retriever.search(QUERY, 50, mode="dense")
        texts = {each.id: each.text for each in results}
        changed = {**DOCUMENTS, "d00": "by another process"}
        del changed["d01"]
        assert texts in (DOCUMENTS, changed)
        assert are_nearest(results, texts, QUERY, 50)
    with place.open(Hashed()) as retriever:
        assert are_nearest(retriever.search(QUERY, 50, mode="dense"), changed, QUERY, 50)


def check_searches_beside_changes_see_one_state(place: Place) -> None:
    done, names = threading.Event(), [f"r{n}" for n in range(20)]
    rounds = [[f"round{number} {n}" for n in range(20)] for number in range(6)]
    with place.open(Hashed()) as retriever:
        retriever.add(rounds[0], ids=names)

        def search() -> None:
            while not done.is_set():
                results = retriever.search("round", 50, mode="dense")
                assert len(results) == 20
                assert len({each.text.split()[0] for each in results}) == 1

        def change() -> None:
            try:
                for texts in rounds[1:]:
                    retriever.add(texts, ids=names)
            finally:
                done.set()

        assert errors_in_threads(search, search, search, change) == []


def change_until_killed(place: Place, retriever: Any) -> None:
    for number in range(10_000):
        names = [f"r{n}" for n in range(20)]
        retriever.add([f"round{number} {n}" for n in range(20)], [{"round": number}] * 20, names)
        place.keep(retriever)
        os.write(1, f"{number}\n".encode())


def check_killed_writer_leaves_a_whole_state(place: Place) -> None:
    with place.open(Hashed()) as retriever:
        place.keep(retriever)
    for wanted in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
            stdout.touch()
            stderr.touch()
            arguments = (__file__, place.source, "change_until_killed")
            pid = ZYGOTES.start(OTHER_PROCESS, *arguments, stdout=stdout, stderr=stderr)
            wait_for(lambda: stdout.read_text().count("\n") >= wanted)
            time.sleep(random.uniform(0, 0.03))  # The next change takes about so long.
            os.kill(pid, signal.SIGKILL)
            assert ZYGOTES.wait() == -signal.SIGKILL, stderr.read_text()
            last = int(stdout.read_text().split()[-1])
        with place.open(Hashed()) as retriever:
            results = retriever.search("round", 50, mode="dense")
            (number,) = {each.metadata["round"] for each in results}
            assert number >= last
            assert {each.text for each in results} == {f"round{number} {n}" for n in range(20)}
            assert len(found(retriever, f"round{number}", mode="bm25")) == 20
            assert found(retriever, f"round{number + 1}", mode="bm25") == []


def check_closed_retriever_raises(place: Place) -> None:
    retriever = place.open(Hashed())
    add(retriever)
    retriever.close()
    for use in (
        lambda: retriever.search(QUERY),
        lambda: retriever.add(["x"]),
        lambda: retriever.delete(["d00"]),
        lambda: retriever.get(["d00"]),
        lambda: retriever.stats(),
    ):
        with pytest.raises(ResourceClosedError):
            use()


CHECKS: tuple[Callable[[Place], None], ...] = tuple(
    each for name, each in sorted(globals().items()) if name.startswith("check_")
)
