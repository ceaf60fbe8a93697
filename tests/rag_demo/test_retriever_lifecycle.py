"""Loading, searching and closing again and again: nothing stays, and answers are of one index."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever
from support.programs import run_forked

ROUNDS = """
import json, os, sys
from pathlib import Path
import numpy as np
from rag_demo import {kind}
from torch_utils import memory_snapshot

class Model:
    name = "m"
    dimension = 64
    def embed_documents(self, texts): return np.ones((len(texts), 64))
    def embed_query(self, text): return np.arange(64) + 1.0

folders = [Path(name) for name in sys.argv[1:3]]
growth = []
for round in range(100):
    with {kind}(Model()) as retriever:
        retriever.load(folders[round % 2])
        retriever.search("x", top_k=3)
        retriever.load(folders[1 - round % 2])
        assert len(retriever.search("x", top_k=3)) == 3
        assert len(retriever.search_batch(["x"] * 8, top_k=3)) == 8
    if round in (9, 99):
        files = len(os.listdir("/proc/self/fd"))
        growth.append([memory_snapshot().host.rss_bytes, files, len(os.listdir("/proc/self/task"))])
print(json.dumps(growth))
"""


class Model:
    """Texts lie anywhere; an index is always made of the same vectors."""

    name = "m"
    dimension = 64

    def embed_documents(self, texts: Any) -> Any:
        return np.random.default_rng(len(texts[0])).standard_normal((len(texts), 64))

    def embed_query(self, text: str) -> Any:
        return np.arange(64) + 1.0


def make_index(folder: Path, name: str, count: int) -> Path:
    with PyTorchGPURetriever(Model(), device="cpu") as retriever:
        texts = [f"{name} text {n}" for n in range(count)]
        retriever.add(texts, [{"of": name}] * count, [f"{name}{n}" for n in range(count)])
        retriever.save(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PyTorchGPURetriever", "FaissRetriever"])
def test_a_hundred_rounds_leave_nothing(kind: str, tmp_path: Path) -> None:
    """From the tenth round on: at most 1 MB more in all, and no thread and no file more."""
    folders = [str(make_index(tmp_path / name, name, 20_000)) for name in ("a", "bb")]
    result = run_forked(ROUNDS.format(kind=kind), *folders)
    assert (result.returncode, result.stderr) == (0, ""), str(result)
    (rss, files, threads), (rss_after, files_after, threads_after) = json.loads(result.stdout)
    assert rss_after - rss < 1 << 20
    assert files_after <= files
    assert threads_after <= threads


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_searches_while_the_index_is_replaced_are_of_one_index(kind: Any, tmp_path: Path) -> None:
    first = make_index(tmp_path / "a", "a", 500)
    second = make_index(tmp_path / "b", "b", 700)
    done, wrong, seen = threading.Event(), [], set()
    with kind(Model()) as retriever:
        retriever.load(first)

        def ask() -> None:
            while not done.is_set():
                for results in retriever.search_batch(["x", "y"], top_k=20):
                    of = {result.metadata["of"] for result in results}
                    seen.update(of)
                    if len(of) != 1 or len(results) != 20:
                        wrong.append(results)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(15):
            retriever.load(second)
            retriever.load(first)
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert seen == {"a", "b"}


def test_index_that_is_open_stays_when_it_is_replaced_on_disk(tmp_path: Path) -> None:
    """Only a retriever that opens it afterwards has the new one."""
    folder = make_index(tmp_path / "i", "a", 500)
    with PyTorchGPURetriever(Model(), device="cpu") as old:
        old.load(folder)
        make_index(folder, "b", 300)
        assert {result.metadata["of"] for result in old.search("x", top_k=500)} == {"a"}
        with PyTorchGPURetriever(Model(), device="cpu") as new:
            assert new.load(folder) == 300
            assert new.search("x")[0].metadata == {"of": "b"}


BUDGET = """
import sys
import numpy as np
from rag_demo import PyTorchGPURetriever
from torch_utils import measuring

class Model:
    name = "m"
    dimension = 384
    def embed_documents(self, texts):
        return np.random.default_rng(0).standard_normal((len(texts), 384), dtype=np.float32)
    def embed_queries(self, texts):
        return np.random.default_rng(1).standard_normal((len(texts), 384), dtype=np.float32)
    def embed_query(self, text): return self.embed_queries([text])[0]

folder, count, budget = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
if budget == 0:
    with PyTorchGPURetriever(Model(), device="cpu") as retriever:
        texts = [f"document {n} about thing{n % 977}" for n in range(count)]
        years = [{"year": 1950 + n % 75} for n in range(count)]
        retriever.add(texts, years, list(map(str, range(count))))
        retriever.save(folder)
    sys.exit()
with PyTorchGPURetriever(Model(), device="cpu", dtype="bfloat16") as other:
    other.add([str(n) for n in range(100)])  # Brings torch's own code into memory.
    other.search_batch(["x", "y"], top_k=10)
    other.search("x", mode="bm25")
with PyTorchGPURetriever(Model(), device="cpu", memory_budget=budget) as retriever:
    for work in (
        lambda: retriever.load(folder),
        lambda: retriever.search("q"),
        lambda: retriever.search_batch(["q"] * 512, top_k=10),
        lambda: retriever.search("q", where={"year": {"$gte": 2000}}),
        lambda: retriever.search("thing5 document", mode="bm25"),
        lambda: retriever.search_batch(["thing5"] * 20, mode="hybrid"),
        lambda: (retriever.add(["z"], ids=["z"]), retriever.delete(["7"]), retriever.search("q")),
    ):
        with measuring() as taken:
            work()
        print(taken.peak_bytes)
"""


@pytest.mark.slow
def test_opening_is_cheap_and_the_memory_budget_is_kept(tmp_path: Path) -> None:
    """One query, 512, a filter, words, both, and changes; without a budget it is exceeded."""
    count, budget = 60_000, 32 << 20
    found = {}
    for option in ("0", str(budget), "None"):
        result = run_forked(BUDGET, str(tmp_path / "i"), str(count), option, quick_end=True)
        assert result.returncode == 0, str(result)
        found[option] = list(map(int, result.stdout.split()))
    limited, unlimited = found[str(budget)], found["None"]
    assert len(limited) == 7
    # Beside the budget: where the lines of the texts are, and where a search by words counts.
    assert max(limited) < budget + 32 * count
    vectors = 4 * 384 * count
    assert max(unlimited) > vectors
    assert unlimited[0] < vectors / 4, "opening reads the vectors"
