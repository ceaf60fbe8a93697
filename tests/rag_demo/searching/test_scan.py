"""The scan against brute force in float64, over data that is made to mislead it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_demo import FaissRetriever, PyTorchGPURetriever, Retriever
from rag_demo.searching import candidates
from rag_demo.searching.exact_scores import exact_scores
from rag_demo.searching.int8_product import _WAYS, Int8Product, _is_good, int8_product
from rag_demo.searching.scan import BLOCK, make_scan
from rag_demo.vectors import normalized

DTYPES = ("float32", "float16", "bfloat16", "int8")


class Given:
    """An embedding model whose texts are the numbers of given vectors."""

    def __init__(self, documents: Any, queries: Any) -> None:
        self._documents, self._queries = documents, queries
        self.dimension = documents.shape[1]

    def embed_documents(self, texts: Any) -> Any:
        return self._documents[[int(text) for text in texts]]

    def embed_queries(self, texts: Any) -> Any:
        return self._queries[[int(text) for text in texts]]

    def embed_query(self, text: str) -> Any:
        return self._queries[int(text)]


def expected(documents: Any, queries: Any, top_k: int) -> list[list[str]]:
    """Sort all of them by the float64 product, ties by id."""
    vectors, asked = normalized(documents).astype(np.float64), normalized(queries)
    answers = []
    for query in asked:
        scores = (vectors * query).sum(axis=1)
        order = sorted(range(len(scores)), key=lambda row: (-scores[row], str(row)))
        answers.append([str(row) for row in order[:top_k]])
    return answers


def ask(retriever: Retriever, count: int, queries: int, top_k: int) -> list[list[str]]:
    retriever.add([str(n) for n in range(count)], ids=[str(n) for n in range(count)])
    found = retriever.search_batch([str(n) for n in range(queries)], top_k=top_k)
    return [[result.id for result in results] for results in found]


@st.composite
def corpora(draw: Any) -> tuple[Any, Any]:
    """Vectors that are alike, of all magnitudes, in clusters, along axes, or repeated."""
    count = draw(st.integers(1, 300))
    dimension = draw(st.sampled_from([1, 2, 7, 32, 65]))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(
        st.sampled_from(
            ["random", "near ties", "duplicates", "clusters", "norms", "axes", "spikes"]
        )
    )
    vectors = chance.standard_normal((count, dimension))
    if kind == "near ties":
        vectors = vectors[:1] + 1e-7 * vectors
    elif kind == "duplicates":
        vectors = vectors[chance.integers(0, max(1, count // 10), count)]
    elif kind == "clusters":
        vectors = vectors[chance.integers(0, min(5, count), count)] + 1e-3 * vectors
    elif kind == "norms":
        vectors *= 10.0 ** chance.integers(-30, 30, (count, 1))
    elif kind == "axes":
        vectors = np.eye(dimension)[chance.integers(0, dimension, count)]
    elif kind == "spikes":
        vectors[:, 0] += 1e4 * (chance.random(count) < 0.5)
    vectors = vectors.astype(np.float32)
    vectors[~vectors.any(axis=1)] = 1
    queries = chance.standard_normal((3, dimension)).astype(np.float32)
    queries[1] = vectors[0]
    return vectors, queries


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=corpora(), top_k=st.sampled_from([1, 3, 10, 500]), one=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_exact_against_float64(dtype: str, data: Any, top_k: int, one: bool) -> None:
    """Whatever is scanned, answers and their order are those of the true vectors."""
    documents, queries = data
    queries = queries[:1] if one else queries
    with PyTorchGPURetriever(Given(documents, queries), device="cpu", dtype=dtype) as retriever:
        assert ask(retriever, len(documents), len(queries), top_k) == expected(
            documents, queries, top_k
        )


@pytest.mark.slow
@given(data=corpora(), top_k=st.sampled_from([1, 10]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_faiss_against_float64(data: Any, top_k: int) -> None:
    """The other retriever gives the same answers."""
    documents, queries = data
    with FaissRetriever(Given(documents, queries)) as retriever:
        assert ask(retriever, len(documents), len(queries), top_k) == expected(
            documents, queries, top_k
        )


def corpus(count: int, dimension: int = 384, seed: int = 0) -> Any:
    return normalized(np.random.default_rng(seed).standard_normal((count, dimension)))


@pytest.mark.parametrize("product", ["int8", pytest.param("fallback", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])]
)
def test_many_blocks(dtype: str, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps, with and without the int8 operator, which not every processor has."""
    if product == "fallback":
        for module in ("candidates", "tensor_vectors"):
            monkeypatch.setattr(
                f"rag_demo.searching.{module}.int8_product", lambda torch, dimension, queries: None
            )
    elif int8_product(torch, 384, 40) is None:
        pytest.skip("this processor has no fast int8 product")
    monkeypatch.setattr("rag_demo.searching.candidates._SCORES", 64 * BLOCK * 20)
    documents, queries = corpus(9_000), corpus(40, seed=1)
    with PyTorchGPURetriever(Given(documents, queries), device="cpu", dtype=dtype) as retriever:
        assert ask(retriever, 9_000, 40, 10) == expected(documents, queries, 10)


def test_control_the_bound_is_needed() -> None:
    """The ten that look best in int8 are not the ten best."""
    documents, queries = corpus(9_000), corpus(40, seed=1)
    with PyTorchGPURetriever(
        Given(documents, queries), device="cpu", dtype="int8", exact=False
    ) as retriever:
        assert ask(retriever, 9_000, 40, 10) != expected(documents, queries, 10)


@pytest.mark.parametrize("kind", DTYPES)
def test_errors_are_bounds(kind: str) -> None:
    """No row is further from its rounded copy than its block says."""
    vectors = corpus(1000)
    scan = make_scan(vectors, kind, "cpu")
    rounded = scan.vectors.double().numpy()
    rounded *= scan.scales.double().repeat_interleave(BLOCK)[:1000, None].numpy()
    distances = np.linalg.norm(vectors - rounded, axis=1)
    errors = scan.errors.double().repeat_interleave(BLOCK)[:1000].numpy()
    assert (distances <= errors).all()
    assert kind == "float32" or distances.max() > errors.max() / 20  # And no idle ones.


def test_pool_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """More candidates than are kept at once, because all of them are nearly the same."""
    monkeypatch.setattr("rag_demo.searching.candidates._POOL", 2_000)
    monkeypatch.setattr("rag_demo.searching.candidates._SCORES", 64 * BLOCK)
    chance = np.random.default_rng(0)
    documents = normalized(1 + 1e-4 * chance.standard_normal((4_000, 32)))
    queries = normalized(1 + 0.01 * chance.standard_normal((4, 32)))
    with PyTorchGPURetriever(Given(documents, queries), device="cpu") as retriever:
        assert ask(retriever, 4_000, 4, 7) == expected(documents, queries, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter(dtype: str) -> None:
    """Inside the search: three match, three come, however far down they are."""
    documents, queries = corpus(5_000, 64), corpus(2, 64, seed=1)
    with PyTorchGPURetriever(Given(documents, queries), device="cpu", dtype=dtype) as retriever:
        names = [str(n) for n in range(5_000)]
        retriever.add(names, [{"kept": n % 1700 == 3} for n in range(5_000)], names)
        for results in retriever.search_batch(["0", "1"], top_k=5, where={"kept": True}):
            assert sorted(result.id for result in results) == ["1703", "3", "3403"]


def multiplied(product: Int8Product, left: Any, right: Any) -> Any:
    room = torch.empty(len(left), len(right), dtype=torch.int32)
    return product.by(right)(left, lambda: room)


@pytest.mark.parametrize("dimension", [1, 2, 3, 8, 31, 384, 2000])
def test_int8_operator(dimension: int) -> None:
    """Where it is used, it is right: small counts of rows and columns, and the largest numbers."""
    product = int8_product(torch, dimension, 2)
    if product is None:
        return  # Not used: the tests above hold without it.
    most = product.most
    for rows, columns in ((1, 1), (1, 5), (31, 3), (64, 17), (500, 512)):
        left = torch.randint(-127, 128, (rows, dimension), dtype=torch.int8)
        right = torch.randint(-most, most + 1, (columns, dimension), dtype=torch.int8)
        left[0], right[0] = 127, most
        left[rows // 2], right[columns // 2] = -127, -most
        assert torch.equal(multiplied(product, left, right).int(), left.int() @ right.int().T)


def test_wrong_int8_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives other numbers, cuts large sums off, is slower, or is not there."""

    def right_one(left: Any, right: Any, *, out: Any) -> Any:
        return out.copy_((left.float() @ right.float()).int())

    def wrong(left: Any, right: Any, *, out: Any) -> Any:
        return out.copy_(left.int() @ right.int() + 1)

    def saturating(left: Any, right: Any, *, out: Any) -> Any:
        pairs = left[:, 0:2].int() @ right[0:2].int()
        rest = left[:, 2:].int() @ right[2:].int()
        return out.copy_(pairs.clamp(-32_000, 32_000) + rest)

    def slow(left: Any, right: Any, *, out: Any) -> Any:
        for _ in range(20):
            right_one(left, right, out=out)
        return out

    def another(left: Any, right: Any) -> Any:
        return left.int() @ right.int()

    monkeypatch.setattr("rag_demo.searching.int8_product._WAYS", _WAYS[:1])
    for operator in (wrong, saturating, slow, another, None):
        _is_good.cache_clear()
        monkeypatch.setattr(torch, "_int_mm", operator, raising=False)
        assert int8_product(torch, 384, 2) is None
    _is_good.cache_clear()
    # What is right, and faster than anything: it is the rest that was refused.
    monkeypatch.setattr(torch, "_int_mm", right_one, raising=False)
    monkeypatch.setattr("rag_demo.searching.int8_product._speed", lambda *args: 2.0)
    product = int8_product(torch, 384, 2)
    assert product is not None and product.most == 127
    _is_good.cache_clear()


def test_layer_without_the_other_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized layer multiplies several queries; one that gives other numbers is not used."""
    monkeypatch.setattr(torch, "_int_mm", None, raising=False)
    monkeypatch.setattr("rag_demo.searching.int8_product._speed", lambda *args: 2.0)
    _is_good.cache_clear()
    product = int8_product(torch, 384, 2)
    if product is not None:  # else this torch has no such layer
        assert product.most == 63
        assert int8_product(torch, 384, 1) is None
    _is_good.cache_clear()
    wrong = Int8Product(
        lambda queries: lambda rows, room: (rows.float() @ queries.float().T + 1).int(),
        63,
        suits_one=False,
    )
    monkeypatch.setattr("rag_demo.searching.int8_product._WAYS", (wrong,))
    assert int8_product(torch, 384, 2) is None
    _is_good.cache_clear()


@pytest.mark.parametrize("dimension", [1, 2, 7, 31, 384])
def test_exact_scores_depend_on_nothing_else(dimension: int) -> None:
    """Bit for bit the same by themselves, in another order, and beside others."""
    documents, queries = corpus(700, dimension), corpus(5, dimension, seed=1)
    chance = np.random.default_rng(0)
    query, row = np.sort(chance.integers(0, 5, 700)), chance.permutation(700)
    all_at_once = exact_scores(documents.__getitem__, queries, query, row)
    for some in (slice(0, 1), slice(3, 100), slice(699, 99, -1)):
        found = exact_scores(documents.__getitem__, queries, query[some], row[some])
        assert np.array_equal(found, all_at_once[some])


@pytest.mark.parametrize("rows", [1, 1024, 1025, 4999])
def test_int8_rows_and_one_query_are_multiplied_in_two_threads(rows: int) -> None:
    """Every row once, in its place, within what float32 may err."""
    chance = np.random.default_rng(rows)
    vectors = torch.from_numpy(chance.integers(-127, 128, (rows, 48), dtype=np.int8))
    query = torch.from_numpy(chance.standard_normal((48, 1), dtype=np.float32))
    found = torch.full((rows, 1), np.nan)
    candidates._product_of_floats(vectors, query, found)
    expected = vectors.double() @ query.double()
    bound = 48 * 2.0**-24 * (vectors.abs().double() @ query.abs().double())
    assert ((found - expected).abs() <= bound).all()


def test_a_device_takes_more_at_once() -> None:
    """Each step waits for what it has found; a budget limits what is taken wherever it is."""
    on_cpu, on_device = candidates._limits("cpu", None), candidates._limits("cuda", None)
    assert on_device[0] > on_cpu[0] and on_device[1] > on_cpu[1]
    assert candidates._limits("cuda", 1 << 24) == candidates._limits("cpu", 1 << 24)
    assert candidates._limits("cuda", 1 << 24)[1] < on_cpu[1]
