"""Dense search against brute force in float64: any size, any dimension, any changes.

`reference` says what counts as exact, and how ties are treated.
"""

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.rag_demo.search.reference import (
    Float64Index,
    GivenVectors,
    check_all,
    filled,
    normal,
    numbered,
)
from tests.support.retriever_kinds import KINDS, QUICK

SLOW = pytest.mark.slow
FEW_KINDS = [*QUICK, *(pytest.param(kind, marks=SLOW) for kind in KINDS if kind not in QUICK)]
SHAPES = ("random", "near ties", "close", "duplicates", "clusters", "norms", "axes", "spikes")


def shaped(shape: str, count: int, dimension: int, seed: int) -> Any:
    """Make vectors that are alike, of all magnitudes, in clusters, along axes, or repeated."""
    chance = np.random.default_rng(seed)
    vectors = chance.standard_normal((count, dimension))
    if shape == "near ties":  # Scores differ by about as much as float32 rounds.
        vectors = vectors[:1] + 1e-7 * vectors
    elif shape == "close":  # Float32 tells them apart, bfloat16 does not.
        vectors = vectors[:1] + 1e-3 * vectors
    elif shape == "duplicates":
        vectors = vectors[chance.integers(0, max(1, count // 10), count)]
    elif shape == "clusters":
        vectors = vectors[chance.integers(0, min(5, count), count)] + 1e-3 * vectors
    elif shape == "norms":
        vectors *= 10.0 ** chance.integers(-30, 30, (count, 1))
    elif shape == "axes":
        vectors = np.eye(dimension)[chance.integers(0, dimension, count)]
    elif shape == "spikes":
        vectors[:, 0] += 1e4 * (chance.random(count) < 0.5)
    vectors = vectors.astype(np.float32)
    vectors[~vectors.any(axis=1)] = 1
    return vectors


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW_KINDS)
@given(
    shape=st.sampled_from(SHAPES),
    count=st.integers(1, 300),
    dimension=st.sampled_from([1, 2, 7, 32, 65]),
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([1, 3, 10, 500]),
    min_score=st.sampled_from([None, 0.5, 0.999]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_to_any_vectors_are_exact(
    kind: str,
    shape: str,
    count: int,
    dimension: int,
    seed: int,
    top_k: int,
    min_score: float | None,
) -> None:
    documents = shaped(shape, count, dimension, seed)
    queries = np.concatenate([documents[:1], normal(2, dimension, seed)])
    with KINDS[kind](GivenVectors(documents, queries)) as retriever:
        index = filled(retriever, GivenVectors(documents, queries))
        check_all(retriever, index, top_k, min_score=min_score)


# Count of documents, dimension, count of queries. Whatever a retriever does differently for few
# and for many (one product of all, a scan in steps, candidates that are thinned out) lies between.
SIZES = [
    (0, 8, 2),
    (1, 1, 2),
    (33, 2, 2),
    (1025, 512, 33),
    (4097, 64, 3),
    (9_000, 128, 40),
    pytest.param(20_000, 384, 40, marks=SLOW),
    pytest.param(33_000, 32, 130, marks=SLOW),
    pytest.param(70_000, 7, 70, marks=SLOW),
    pytest.param(33_000, 512, 4, marks=SLOW),
]


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize(("count", "dimension", "queries"), SIZES)
def test_answers_of_any_size_are_exact(kind: str, count: int, dimension: int, queries: int) -> None:
    model = GivenVectors(normal(count, dimension), normal(queries, dimension, seed=1))
    with KINDS[kind](model) as retriever:
        index = filled(retriever, model)
        check_all(retriever, index, 10)
        check_all(retriever, index, 5, where={"even": True})
        check_all(retriever, index, 7, where={"hundred": 3}, min_score=0.1)


STEPS = {"bfloat16": 2.0**-3, "float16": 2.0**-6}  # of numbers near 20, see below


def misleading(dtype: str, count: int = 1_500, dimension: int = 256) -> GivenVectors:
    """Make documents whose rounded copies err as much as a proven bound allows, both ways.

    Ten documents lose almost half a step of the type in each number, all others gain almost half
    a step. These score a little less, and much more if they are rounded. The query has nothing
    where the first number is: this makes the length a power of two, so that normalizing moves no
    number to another step.
    """
    chance = np.random.default_rng(5)
    step = STEPS[dtype]
    steps = np.full((count, dimension), 20 / step)
    best = np.zeros(count, bool)
    best[chance.choice(count // 40, 10, replace=False) * 40] = True
    for row in np.flatnonzero(~best):
        steps[row, 1 + chance.choice(dimension - 1, 8, replace=False)] -= 1
    documents = (steps + np.where(best, 0.49, 0.51)[:, None]) * step
    rest = (documents[:, 1:] ** 2).sum(axis=1)
    documents[:, 0] = np.sqrt(512**2 - rest)
    query = np.ones((1, dimension))
    query[0, 0] = 0
    signs = chance.choice([-1.0, 1.0], dimension)
    return GivenVectors(documents * signs, np.repeat(query * signs, 3, axis=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STEPS)
def test_answers_are_exact_where_rounding_misleads_most(kind: str, dtype: str) -> None:
    model = misleading(dtype)
    with KINDS[kind](model) as retriever:
        check_all(retriever, filled(retriever, model), 10)


@pytest.mark.parametrize("kind", ["default", pytest.param("float16", marks=SLOW)])
def test_equal_vectors_are_ordered_by_id(kind: str, tmp_path: Path) -> None:
    vectors = normal(750, 12)
    vectors[np.arange(750) % 3 == 0] = vectors[7]  # 250 are equal,
    vectors[1:200:3] = vectors[8]  # and 67,
    vectors[2:59:3] = vectors[5]  # and 19.
    model = GivenVectors(vectors, np.concatenate([vectors[[7, 8, 5]], normal(2, 12, seed=1)]))
    with KINDS[kind](model) as retriever:
        index = filled(retriever, model)
        for top_k in (1, 10, 300):
            check_all(retriever, index, top_k)
            check_all(retriever, index, top_k, where={"even": True})
            check_all(retriever, index, top_k, where={"hundred": 3})
        first = [result.id for result in retriever.search("0", 20, mode="dense")]
        assert retriever.delete(first) == index.delete(first) == 20
        for each in (retriever, index):
            each.add(["7", "7"], [{}, {}], ["0 is first", "z"])
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        check_all(retriever, index, 10)


@SLOW
def test_index_larger_than_the_memory_budget_is_exact(tmp_path: Path) -> None:
    model = GivenVectors(normal(20_000, 64), normal(6, 64, seed=1))
    with KINDS["default"](model) as writer:
        index = filled(writer, model)
        writer.save(tmp_path / "index")
    with KINDS["default"](model, memory_budget=1 << 20) as retriever:
        retriever.load(tmp_path / "index")
        check_all(retriever, index, 7)
        check_all(retriever, index, 7, where={"even": True})
        assert retriever.delete(["7", "77"]) == index.delete(["7", "77"]) == 2
        for each in (retriever, index):
            each.add(["9"], [{}], ["new"])
        check_all(retriever, index, 7)


def test_no_queries_have_no_answers() -> None:
    model = GivenVectors(normal(3, 4), normal(1, 4))
    with KINDS["default"](model) as retriever:
        filled(retriever, model)
        assert retriever.search_batch([], 3) == []


class Changes(RuleBasedStateMachine):
    """Documents come, are replaced and go; in between everything is saved and loaded."""

    vectors = np.concatenate([normal(900, 12), shaped("close", 900, 12, 2)])
    # Of the last 200, each pair is one vector: these are exact ties.
    model = GivenVectors(np.concatenate([vectors, np.repeat(vectors[:100], 2, 0)]), normal(8, 12))
    counts = st.sampled_from([1, 1, 2, 40, 700])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.retriever = KINDS[kind](self.model)
        self.index = Float64Index(self.model)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.retriever.close()
        self.folder.cleanup()

    @initialize(count=st.sampled_from([0, 5, 1500]))
    def begin(self, count: int) -> None:
        if count:
            self.change(count, 0)

    @rule(count=counts, seed=st.integers(0, 2**16))
    def change(self, count: int, seed: int) -> None:
        chance = random.Random(seed)
        names = chance.sample(numbered(3_000), count)
        texts = [str(chance.randrange(len(self.model.documents))) for _ in names]
        metadata = [{"odd": int(text) % 2} for text in texts]
        assert self.retriever.add(texts, metadata, names) == names
        self.index.add(texts, metadata, names)

    @precondition(lambda self: self.index.documents)
    @rule(count=counts, seed=st.integers(0, 2**16))
    def delete(self, count: int, seed: int) -> None:
        names = sorted(self.index.documents)
        gone = [*random.Random(seed).sample(names, min(count, len(names))), "nobody"]
        assert self.retriever.delete(gone) == self.index.delete(gone) == len(gone) - 1

    @rule()
    def delete_all(self) -> None:
        assert self.retriever.delete(list(self.index.documents)) == len(self.index.documents)
        self.index.documents.clear()

    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name, "index")
        self.retriever.save(path)
        assert self.retriever.load(path) == len(self.index.documents)

    @rule(query=st.integers(0, 7), top_k=st.sampled_from([1, 7, 5_000]))
    def ask(self, query: int, top_k: int) -> None:
        results = self.retriever.search(f"{query}", top_k, mode="dense")
        self.index.check([results], [f"{query}"], top_k)

    @rule(min_score=st.sampled_from([None, 0.4]))
    def ask_all(self, min_score: float | None) -> None:
        check_all(self.retriever, self.index, 6, min_score=min_score)

    @invariant()
    def some_answers_are_exact(self) -> None:
        assert len(self.retriever) == len(self.index.documents)
        results = self.retriever.search("1", 4, where={"odd": 1}, mode="dense")
        self.index.check([results], ["1"], 4, where={"odd": 1})


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_answers_after_any_changes_are_exact(kind: str) -> None:
    run_state_machine_as_test(
        partial(Changes, kind),
        settings=settings(
            max_examples=12,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
