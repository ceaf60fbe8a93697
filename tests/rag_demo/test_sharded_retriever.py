"""`ShardedRetriever`: the contract, exact dense answers, and shards that were made apart."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, ModelMismatchError, PyTorchGPURetriever, ShardedRetriever
from tests.support.small_collections import Hashed, text_of

CHECKS = runpy.run_path(str(Path(__file__).with_name("contract.py")))["CHECKS"]
SLOW = ("killed", "another_process")  # They start interpreters.


class ShardsPlace:
    """Two folders, one for each kind of retriever."""

    keeps_nul = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = (
            "import pathlib, runpy\n"
            f"place = runpy.run_path({__file__!r})['ShardsPlace'](pathlib.Path({str(folder)!r}))"
        )

    def open(self, model: Any) -> Any:
        shards = [PyTorchGPURetriever(model, device="cpu"), FaissRetriever(model)]
        for n, shard in enumerate(shards):
            if (self.folder / str(n)).exists():
                shard.load(self.folder / str(n))
        return ShardedRetriever(shards)

    def keep(self, retriever: Any) -> None:
        for n, shard in enumerate(retriever.shards):
            shard.save(self.folder / str(n))


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.__name__, marks=pytest.mark.slow if slow else ())
        for check in CHECKS
        for slow in [any(word in check.__name__ for word in SLOW)]
        # Two folders cannot change together, and each is durable by itself.
        if "killed" not in check.__name__
    ],
)
def test_shards_keep_the_contract(check: Any, tmp_path: Path) -> None:
    check(ShardsPlace(tmp_path))


def test_dense_answers_equal_those_of_one_retriever() -> None:
    vectors = np.random.default_rng(1).standard_normal((900, 16)).astype(np.float32)
    vectors[500:540] = vectors[0]
    texts = [f"{text_of(n)} unique{n}" for n in range(900)]
    with (
        PyTorchGPURetriever(Hashed(), device="cpu") as one,
        ShardedRetriever([PyTorchGPURetriever(Hashed(), device="cpu") for _ in range(3)]) as shards,
    ):
        for part in (slice(n, n + 100) for n in range(0, 900, 100)):
            for each in (one, shards):
                each.add(
                    texts[part], ids=[f"n{n}" for n in range(900)[part]], vectors=vectors[part]
                )
        assert all(shard.stats().size > 200 for shard in shards.shards)
        for vector in vectors[:5]:
            assert shards.search(None, 60, vector=vector) == one.search(None, 60, vector=vector)
        (best,) = shards.search("unique77", 1, mode="bm25")
        assert best.id == "n77"
        assert shards.search("unique77 golf", 3, vector=vectors[77])[0].id == "n77"


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
