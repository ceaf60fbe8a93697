"""`ShardedRetriever`: answers of several retrievers as of one."""

from __future__ import annotations

import numpy as np
import pytest

from rag_demo import (
    FaissRetriever,
    ModelMismatchError,
    PyTorchGPURetriever,
    RagDemoError,
    ShardedRetriever,
)
from tests.support.small_collections import Hashed, text_of


def test_answers_equal_those_of_one_retriever() -> None:
    """Equal vectors lie in several shards."""
    vectors = np.random.default_rng(1).standard_normal((900, 16)).astype(np.float32)
    vectors[250:540] = vectors[0]
    texts = [f"{text_of(n)} unique{n}" for n in range(900)]
    names, metadata = [f"n{n:03}" for n in range(900)], [{"odd": n % 2} for n in range(900)]
    every = [PyTorchGPURetriever(Hashed(), device="cpu") for _ in range(3)]
    with PyTorchGPURetriever(Hashed(), device="cpu") as one, ShardedRetriever(every) as shards:
        one.add(texts, metadata, names, vectors=vectors)
        for n, shard in enumerate(every):
            part = slice(300 * n, 300 * n + 300)
            shard.add(texts[part], metadata[part], names[part], vectors=vectors[part])
        for vector in vectors[:5]:
            for where in (None, {"odd": 1}):
                wanted = one.search(None, 60, vector=vector, where=where)
                assert shards.search(None, 60, vector=vector, where=where) == wanted
        (best,) = shards.search("unique77", 1, mode="bm25")
        assert best.id == "n077"
        assert shards.search("unique77 golf", 3, vector=vectors[77])[0].id == "n077"
        assert shards.documents(after="n598", limit=4) == one.documents(after="n598", limit=4)
        assert shards.get(["n700", "unknown", "n1"]) == one.get(["n700", "unknown", "n1"])
        assert (len(shards), sorted(shards.ids())) == (900, names)
        assert shards.count({"odd": 1}) == 450
        assert shards.stats() == one.stats()


def test_changes_are_made_in_the_shards() -> None:
    shard = PyTorchGPURetriever(Hashed(), device="cpu")
    with ShardedRetriever([shard]) as shards:
        shard.add(["text"], ids=["a"])
        for change in (
            lambda: shards.add(["more"]),
            lambda: shards.delete(["a"]),
            lambda: shards.update_metadata(["a"], [{"n": 1}]),
        ):
            with pytest.raises(RagDemoError, match="changed one by one"):
                change()
        assert [each.text for each in shards.documents()] == ["text"]


def test_shards_of_different_models_are_refused_and_closed() -> None:
    other = Hashed()
    other.name = "another"
    shards = [PyTorchGPURetriever(Hashed(), device="cpu"), FaissRetriever(other)]
    for shard in shards:
        shard.add(["text"])
    with pytest.raises(ModelMismatchError, match="another"):
        ShardedRetriever(shards)
    assert [shard.closed for shard in shards] == [True, True]
    with pytest.raises(ValueError, match="at least one"):
        ShardedRetriever([])
