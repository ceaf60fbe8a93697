"""The search kernel against float64, with the profile of every device, on the CPU."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rag_demo.exact_search.search import Products, Source, products_on, search
from tests.rag_demo.search.reference import directions, shaped

UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ON_CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOW_FLOAT16 = pytest.param(torch.float16, marks=pytest.mark.slow)


def wide_products(device: Any, dtype: Any) -> Products:
    """Multiply as CUDA does: rounded vectors, float32 scores."""
    return Products(lambda q, v: torch.mm(q.float(), v.float().T), dtype)


def narrow_products(device: Any, dtype: Any) -> Products:
    """Round the scores as well, as torch before 2.8 does."""
    unit = UNITS.get(dtype, 0.0)
    return Products(lambda q, v: torch.mm(q, v.T), dtype, unit * 1.01, 16 * unit)


class Profile(NamedTuple):
    """How a device multiplies, its memory, and whether it computes in float64."""

    products: Any
    scratch_bytes: int | None = None
    has_float64: bool = False


PROFILES = {
    "cpu": Profile(products_on),
    "cpu, little memory": Profile(products_on, 1),
    "gpu": Profile(wide_products, has_float64=True),
    "gpu, little memory": Profile(wide_products, 1, has_float64=True),
    "no float64, narrow scores": Profile(narrow_products),
}


def vectors_of(shape: str, count: int, dimension: int) -> Any:
    return directions(shaped(shape, count, dimension, count)).astype(np.float32)


def source_of(vectors: Any, dtype: Any, allowed: Any, profile: Profile) -> Source:
    true = torch.from_numpy(vectors)
    rounded = true.to(dtype)
    distance = float((true - rounded.float()).norm(dim=1).max()) * (1 + 1e-4)
    most = len(vectors) if profile.scratch_bytes is None else 300
    return Source(
        ON_CPU,
        profile.products(ON_CPU, dtype),
        lambda rows: rounded.split(min(rows, most)),
        lambda rows: vectors.take(rows, axis=0),
        allowed,
        0.0 if dtype == torch.float32 else distance,
        true if profile.has_float64 and dtype == torch.float32 else None,
        profile.scratch_bytes,
    )


def assert_exact(
    vectors: Any, queries: Any, top_k: int, dtype: Any, profile: Profile, allowed: Any = None
) -> None:
    """Assert that all rows that score as the k-th best or better are found, with their scores.

    A query by itself has the same scores, to the last bit.
    """
    source = source_of(vectors, dtype, allowed, profile)
    rows = np.arange(len(vectors)) if allowed is None else np.flatnonzero(allowed)
    top_k = min(top_k, len(rows))
    pairs, alone = search(source, queries, top_k), search(source, queries[:1], top_k)
    assert (np.diff(pairs.query) >= 0).all()
    wide = vectors[rows].astype(np.float64)
    for number, query in enumerate(queries.astype(np.float64)):
        scores = (wide * query).sum(axis=1)
        its = pairs.query == number
        found = dict(zip(pairs.row[its].tolist(), pairs.scores[its].tolist(), strict=True))
        assert len(found) == its.sum()
        best = rows[scores >= np.sort(scores)[-top_k]]
        assert set(best.tolist()) <= set(found) <= set(rows.tolist())
        expected = scores[np.searchsorted(rows, list(found))]
        np.testing.assert_allclose(list(found.values()), expected, rtol=0, atol=1e-14)
        if number == 0:
            assert dict(zip(alone.row.tolist(), alone.scores.tolist(), strict=True)) == found


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, SLOW_FLOAT16], ids=str)
@pytest.mark.parametrize("shape", ["random", "duplicates", "near ties", "close"])
def test_answers_are_exact(profile: Profile, dtype: Any, shape: str) -> None:
    vectors = vectors_of(shape, 1200, 33)
    queries = np.concatenate([vectors[3:4], vectors_of("random", 5, 33)])
    chance = np.random.default_rng(0).random(1200)
    few, many = (chance < 0.3) & (np.arange(1200) > 700), chance < 0.7
    for top_k, allowed in ((1, None), (10, few), (100, many), (5000, few)):
        assert_exact(vectors, queries, top_k, dtype, profile, allowed)


@pytest.mark.parametrize("profile", ["cpu", "cpu, little memory", "gpu"])
def test_answers_are_exact_around_the_edges_of_blocks(profile: str) -> None:
    for count in (1, 2, 17, 18, 19, 127, 128, 129, 1023, 1024, 1025, 2047, 4097):
        vectors, queries = vectors_of("random", count, 7), vectors_of("random", 3, 7)
        for dtype in DTYPES:
            assert_exact(vectors, queries, 10, dtype, PROFILES[profile])


def test_answers_are_exact_if_the_program_allows_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    is_new = hasattr(torch.backends.cuda.matmul, "fp32_precision")
    option = ("fp32_precision", "tf32") if is_new else ("allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, *option)
    vectors = vectors_of("close", 1200, 24)
    assert_exact(vectors, vectors[:3], 10, torch.float32, PROFILES["cpu"])
