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
    rule,
    run_state_machine_as_test,
)

from tests.rag_demo.search.reference import (
    SHAPES,
    Float64Index,
    GivenVectors,
    check_all,
    filled,
    normal,
    numbered,
    shaped,
)
from tests.support import retriever_kinds
from tests.support.retriever_kinds import QUICK, OnCpu

SLOW = pytest.mark.slow


def streamed(model: Any) -> Any:
    """Return a retriever that reads a loaded index of many documents from its file."""
    return OnCpu(model, memory_budget=4096 * model.dimension)


KINDS = retriever_kinds.KINDS | {"streamed": streamed}
FEW_KINDS = [*QUICK, *(pytest.param(kind, marks=SLOW) for kind in KINDS if kind not in QUICK)]
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck))


@SLOW
@pytest.mark.parametrize("kind", FEW_KINDS)
@given(
    shape=st.sampled_from(SHAPES),
    count=st.integers(1, 300),
    dimension=st.sampled_from([1, 2, 7, 32, 65]),
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([1, 3, 10, 500]),
    min_score=st.sampled_from([None, 0.5, 0.999]),
)
@settings(MANY, max_examples=30)
def test_answers_to_any_vectors_are_exact(
    kind: str, shape: str, count: int, dimension: int, seed: int, top_k: int, min_score: Any
) -> None:
    documents = shaped(shape, count, dimension, seed)
    model = GivenVectors(documents, np.concatenate([documents[:1], normal(2, dimension, seed)]))
    with KINDS[kind](model) as retriever:
        check_all(retriever, filled(retriever, model), top_k, min_score=min_score)


# Count of documents, dimension, count of queries. Whatever a retriever does differently for few
# and for many (one product of all, a scan in steps, candidates that are thinned out) lies between.
SIZES = [
    (0, 8, 2),
    (1, 1, 2),
    (33, 2, 2),
    (1025, 96, 33),
    pytest.param(4097, 64, 3, marks=SLOW),
    pytest.param(20_000, 384, 40, marks=SLOW),
    pytest.param(33_000, 32, 130, marks=SLOW),
    pytest.param(70_000, 7, 70, marks=SLOW),
    pytest.param(33_000, 512, 4, marks=SLOW),
]


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize(("count", "dimension", "queries"), SIZES)
def test_answers_of_any_size_are_exact(
    kind: str, count: int, dimension: int, queries: int, tmp_path: Path
) -> None:
    """Before and after a save and a load."""
    model = GivenVectors(normal(count, dimension), normal(queries, dimension, seed=1))
    with KINDS[kind](model) as retriever:
        index = filled(retriever, model)
        check_all(retriever, index, 10)
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        check_all(retriever, index, 5, where={"even": True})
        check_all(retriever, index, 7, where={"hundred": 3}, min_score=0.1)


STEPS = {"bfloat16": 2.0**-3, "float16": 2.0**-6}  # of numbers near 20, see below


def misleading(dtype: str) -> GivenVectors:
    """Make documents whose rounded copies err as much as a proven bound allows, both ways.

    Ten documents lose almost half a step of the type in each number, all others gain almost half
    a step. These score a little less, and much more if they are rounded. The queries have nothing
    where the first number is: this makes the length a power of two, so that normalizing moves no
    number to another step.
    """
    count, dimension = 800, 256
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
    return GivenVectors(documents * signs, np.repeat(query * signs, 5, axis=0))


@pytest.mark.parametrize("kind", ["default", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", STEPS)
def test_answers_are_exact_where_rounding_misleads_most(kind: str, dtype: str) -> None:
    model = misleading(dtype)
    with KINDS[kind](model) as retriever:
        check_all(retriever, filled(retriever, model), 10)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_equal_vectors_are_ordered_by_id(kind: str) -> None:
    """Also after some of them have gone, and others have come."""
    vectors = normal(4_200, 12)
    vectors[::30] = vectors[7]  # 140 are equal,
    vectors[1:2000:30] = vectors[8]  # and 67,
    vectors[2:590:30] = vectors[5]  # and 20.
    model = GivenVectors(vectors, np.concatenate([vectors[[7, 8, 5]], normal(2, 12, seed=1)]))
    with KINDS[kind](model) as retriever:
        index = filled(retriever, model)
        for top_k in (10, 300):
            check_all(retriever, index, top_k)
            check_all(retriever, index, top_k, where={"even": True})
        first = [result.id for result in retriever.search("0", 20, mode="dense")]
        assert retriever.delete(first) == index.delete(first) == 20
        for each in (retriever, index):
            each.add(["7", "7"], [{}, {}], ["0 is first", "z"])
        check_all(retriever, index, 10)


class Changes(RuleBasedStateMachine):
    """Documents come, are replaced and go; in between everything is saved and loaded."""

    vectors = np.concatenate([normal(900, 12), shaped("close", 900, 12, 2)])
    # The last 200 are two vectors: many exact ties.
    model = GivenVectors(np.concatenate([vectors, np.repeat(vectors[:2], 100, 0)]), normal(8, 12))
    counts = st.sampled_from([1, 1, 2, 40, 700, 3_000])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.retriever = KINDS[kind](self.model)
        self.index = Float64Index(self.model)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.retriever.close()
        self.folder.cleanup()

    @initialize(count=st.sampled_from([5, 1500]))
    def begin(self, count: int) -> None:
        self.change(count, 0)

    @rule(count=counts, seed=st.integers(0, 2**16))
    def change(self, count: int, seed: int) -> None:
        chance = random.Random(seed)
        names = chance.sample(numbered(3_000), count)
        texts = [str(chance.randrange(len(self.model.documents))) for _ in names]
        metadata = [{"odd": int(text) % 2} for text in texts]
        assert self.retriever.add(texts, metadata, names) == names
        self.index.add(texts, metadata, names)

    @rule(count=counts, seed=st.integers(0, 2**16))
    def delete(self, count: int, seed: int) -> None:
        """Delete some, or all."""
        names = sorted(self.index.documents)
        gone = [*random.Random(seed).sample(names, min(count, len(names))), "nobody"]
        assert self.retriever.delete(gone) == self.index.delete(gone) == len(gone) - 1

    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name, "index")
        self.retriever.save(path)
        assert self.retriever.load(path) == len(self.index.documents)

    @rule(top_k=st.sampled_from([1, 7, 5_000]), min_score=st.sampled_from([None, 0.4]))
    def ask(self, top_k: int, min_score: float | None) -> None:
        check_all(self.retriever, self.index, top_k, min_score=min_score)

    @invariant()
    def some_answers_are_exact(self) -> None:
        assert len(self.retriever) == len(self.index.documents)
        results = self.retriever.search("1", 4, where={"odd": 1}, mode="dense")
        self.index.check([results], ["1"], 4, where={"odd": 1})


@SLOW
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_answers_after_any_changes_are_exact(kind: str) -> None:
    limits = settings(MANY, max_examples=12, stateful_step_count=15)
    run_state_machine_as_test(partial(Changes, kind), settings=limits)
