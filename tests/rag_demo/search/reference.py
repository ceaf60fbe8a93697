"""A float64 reference of search, and the check that compares answers with it.

What counts as exact. The reference score is the cosine of the model's float32 vectors, computed
in float64. A retriever may store vectors as float32 of length 1, which moves a score by at most
2 * 2**-24. `ROUNDING` is twice that, and it is all the tolerance there is:

- a reported score differs from the reference score by at most `ROUNDING`;
- the j-th answer's reference score differs from the j-th best one by at most 2 * `ROUNDING`. So
  documents may change places only if their scores differ by less than float32 vectors can tell;
- documents with identical vectors are exact ties: they have one score and come in order of ids.
"""

from typing import Any

import numpy as np

ROUNDING = 2.0**-22
SHAPES = ("random", "near ties", "close", "duplicates", "clusters", "norms", "axes", "spikes")


class GivenVectors:
    """An embedding model whose texts are numbers of given vectors: "7", or "7 and some words"."""

    name = "given vectors"

    def __init__(self, documents: Any, queries: Any) -> None:
        self.documents = np.asarray(documents, np.float32)
        self.queries = np.asarray(queries, np.float32)
        self.dimension = self.documents.shape[1]

    def embed_documents(self, texts: Any) -> Any:
        return self.documents[[int(text.split()[0]) for text in texts]]

    def embed_queries(self, texts: Any) -> Any:
        return self.queries[[int(text.split()[0]) for text in texts]]

    def embed_query(self, text: str) -> Any:
        return self.embed_queries([text])[0]


class Float64Index:
    """What a retriever should hold: texts and metadata by id, searched by brute force."""

    def __init__(self, model: GivenVectors) -> None:
        self.model = model
        self.documents: dict[str, tuple[str, dict[str, Any]]] = {}
        self._directions = directions(model.documents)
        first: dict[bytes, int] = {}  # By the bits of a row, the number of the first such row.
        same = [first.setdefault(row.tobytes(), n) for n, row in enumerate(model.documents)]
        self._same = np.asarray(same, int)

    def add(self, texts: Any, metadata: Any, ids: Any) -> None:
        self.documents.update(zip(ids, zip(texts, metadata, strict=True), strict=True))

    def delete(self, ids: Any) -> int:
        return sum(self.documents.pop(name, None) is not None for name in ids)

    def check(
        self, answers: Any, queries: list[str], top_k: int, where: Any = None, min_score: Any = None
    ) -> None:
        """Assert that answers are exact, a list of results for each query; see the module."""
        wanted = (where or {}).items()
        names = [name for name, (_, its) in self.documents.items() if wanted <= its.items()]
        numbers = [int(self.documents[name][0].split()[0]) for name in names]
        scores = directions(self.model.embed_queries(queries)) @ self._directions[numbers].T
        same, place = self._same[numbers], {name: row for row, name in enumerate(names)}
        for results, its_scores in zip(answers, scores, strict=True):
            assert [result.rank for result in results] == list(range(1, len(results) + 1))
            for result in results:
                assert (result.text, result.metadata) == self.documents[result.id]
            rows = [place[result.id] for result in results]
            assert len(set(rows)) == len(rows), "a document stands twice"
            _check_scores(results, rows, its_scores, top_k, min_score)
            _check_identical(results, same[rows].tolist(), same, names)


def numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def filled(retriever: Any, model: GivenVectors) -> Float64Index:
    """Add all of a model's vectors, with metadata, in an order that is not that of the ids."""
    texts = numbered(len(model.documents))[::-1]
    metadata = [{"hundred": int(text) % 100, "even": int(text) % 2 == 0} for text in texts]
    index = Float64Index(model)
    for each in (index, retriever):
        each.add(texts, metadata, texts)
    return index


def check_all(retriever: Any, index: Float64Index, top_k: int, **options: Any) -> None:
    """Compare a batch of all queries with the reference, and the first query by itself."""
    queries = numbered(len(index.model.queries))
    batch = retriever.search_batch(queries, top_k, mode="dense", **options)
    assert len(batch) == len(queries) > 0
    index.check(batch, queries, top_k, **options)
    assert retriever.search("0", top_k, mode="dense", **options) == batch[0]
    assert retriever.search_batch([], top_k, mode="dense", **options) == []


def normal(count: int, dimension: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, dimension), dtype=np.float32)


def shaped(shape: str, count: int, dimension: int, seed: int = 0) -> Any:
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


def directions(vectors: Any) -> Any:
    """Return vectors of length 1 in float64: shape (n, d)."""
    wide = np.asarray(vectors, np.float64)
    return wide / np.linalg.norm(wide, axis=-1, keepdims=True)


def _check_scores(
    results: Any, rows: list[int], scores: Any, top_k: int, min_score: float | None
) -> None:
    fewest = most = min(top_k, len(scores))
    if min_score is not None:
        fewest = min(top_k, int((scores >= min_score + ROUNDING).sum()))
        most = min(top_k, int((scores >= min_score - ROUNDING).sum()))
        assert all(result.score >= min_score for result in results)
    assert fewest <= len(results) <= most, (len(results), fewest, most)
    best = np.sort(scores)[::-1][: len(rows)]
    np.testing.assert_allclose([result.score for result in results], scores[rows], 0, ROUNDING)
    np.testing.assert_allclose(scores[rows], best, 0, 2 * ROUNDING)
    order = [(-result.score, result.id) for result in results]
    assert order == sorted(order), "not ordered by score, ties by id"


def _check_identical(results: Any, groups: list[int], same: Any, names: list[str]) -> None:
    """Of documents with identical vectors, the first by id are found, with one score."""
    by_group: dict[int, list[Any]] = {}
    for result, group in zip(results, groups, strict=True):
        by_group.setdefault(group, []).append(result)
    for group, its in by_group.items():
        assert len({result.score for result in its}) == 1, "identical vectors score differently"
        ties = sorted(names[row] for row in np.flatnonzero(same == group))
        assert [result.id for result in its] == ties[: len(its)], "ties are not ordered by id"
