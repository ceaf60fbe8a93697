"""Loading, searching and closing again and again: nothing stays, and nobody sees a mixture."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import ROOT
from rag_demo import FaissRetriever, PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.index import write_index

ROUNDS = """
import json, os, sys, threading
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
    with {kind}(Model(){options}) as retriever:
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
    """Every text lies where the others do."""

    name = "m"
    dimension = 64

    def embed_documents(self, texts: Any) -> Any:
        return np.ones((len(texts), 64))

    def embed_query(self, text: str) -> Any:
        return np.arange(64) + 1.0


def make_index(folder: Path, name: str, count: int = 20_000, dimension: int = 64) -> Path:
    random = np.random.default_rng(len(name))
    vectors = random.standard_normal((count, dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    documents = [Document(f"{name}{n}", f"{name} text {n}", {"of": name}) for n in range(count)]
    write_index(folder, "m", vectors, documents)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PyTorchGPURetriever", ", device='cpu'"), ("FaissRetriever", "")],
)
def test_a_hundred_rounds_leave_nothing(kind: str, options: str, tmp_path: Path) -> None:
    """From the tenth round on: at most 1 MB more in all, no thread and no file more."""
    folders = [str(make_index(tmp_path / name, name)) for name in ("a", "bb")]
    program = ROUNDS.format(kind=kind, options=options)
    done = subprocess.run(
        [sys.executable, "-c", program, *folders],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    (rss, files, threads), (rss_after, files_after, threads_after) = json.loads(done.stdout)
    assert rss_after - rss < 1 << 20
    assert files_after <= files
    assert threads_after <= threads
    assert done.stderr == ""


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_searches_while_the_index_is_replaced(kind: Any, tmp_path: Path) -> None:
    """Eight threads see answers of one index or of the other, each from a single one."""
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


def test_index_replaced_on_the_disk_while_open(tmp_path: Path) -> None:
    """Who has the old one open goes on with it; who opens it now gets the new one."""
    folder = make_index(tmp_path / "i", "a", 500)
    with PyTorchGPURetriever(Model(), device="cpu") as old:
        old.load(folder)
        make_index(folder, "b", 300)
        assert {result.metadata["of"] for result in old.search("x", top_k=500)} == {"a"}
        with PyTorchGPURetriever(Model(), device="cpu") as new:
            assert new.load(folder) == 300
            assert new.search("x")[0].metadata == {"of": "b"}


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_stats(kind: Any) -> None:
    """Size, dimension, device, dtype and bytes."""
    options = {"device": "cpu"} if kind is PyTorchGPURetriever else {}
    with kind(Model(), **options) as retriever:
        assert (retriever.stats().size, retriever.stats().dimension) == (0, 0)
        retriever.add([str(n) for n in range(100)])
        stats = retriever.stats()
        assert (stats.size, stats.dimension, stats.device) == (100, 64, "cpu")
        assert (stats.dtype, stats.nbytes) == ("float32", 100 * 64 * 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_bytes_of_rounded_vectors(dtype: str) -> None:
    """With exact answers the float32 vectors are kept beside them, without they are not."""
    size = 1 if dtype == "int8" else 2
    for exact, nbytes in ((True, 128 * 64 * (size + 4)), (False, 128 * 64 * size)):
        with PyTorchGPURetriever(Model(), device="cpu", dtype=dtype, exact=exact) as retriever:
            retriever.add([str(n) for n in range(128)])
            assert retriever.stats().nbytes == nbytes
            assert len(retriever.search("x", top_k=5)) == 5


STREAM = """
import sys
import numpy as np
from rag_demo import PyTorchGPURetriever
from torch_utils import memory_snapshot, measuring

class Model:
    name = "m"
    dimension = 64
    def embed_documents(self, texts): return np.ones((len(texts), 64))
    def embed_query(self, text): return np.random.default_rng(len(text)).standard_normal(64)

budget = eval(sys.argv[2])
with PyTorchGPURetriever(Model(), device="cpu", memory_budget=budget) as retriever:
    with PyTorchGPURetriever(Model(), device="cpu", dtype="bfloat16") as other:
        other.add([str(n) for n in range(100)])  # Brings torch's own code into memory.
        other.search_batch(["x", "y"], top_k=10)
    with measuring() as result:
        retriever.load(sys.argv[1])
        for n in range(3):
            found = retriever.search_batch(["x" * (n + 1), "y" * (n + 5)], top_k=10)
    print(result.peak_bytes, [[r.id for r in results] for results in found])
"""


@pytest.mark.slow
def test_memory_budget_is_kept(tmp_path: Path) -> None:
    """An index of 128 MB within 32 MB, and the answers are the same; without, it is not."""
    folder = make_index(tmp_path / "i", "a", 500_000)
    # Beside the budget: where the lines of the texts are, some 16 bytes each.
    peaks, answers = [], []
    for budget in ("32 << 20", "None"):
        done = subprocess.run(
            [sys.executable, "-c", STREAM, str(folder), budget],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        peak, _, answer = done.stdout.partition(" ")
        peaks.append(int(peak))
        answers.append(answer)
    assert answers[0] == answers[1]
    assert peaks[0] < (32 << 20) + 16 * 500_000 + (16 << 20)
    assert peaks[1] > 128 << 20


def test_streamed_index_changes(tmp_path: Path) -> None:
    """Adding to one that is streamed, or deleting from it, brings it into memory first."""
    folder = make_index(tmp_path / "i", "a", 20_000)
    with PyTorchGPURetriever(Model(), device="cpu", memory_budget=1 << 20) as retriever:
        retriever.load(folder)
        assert retriever.embeddings_tensor is None
        best = retriever.search("x", top_k=2)
        assert retriever.delete([best[0].id]) == 1
        assert retriever.search("x", top_k=1)[0].id == best[1].id
        retriever.add(["new"], ids=["new"])
        assert len(retriever) == 20_000
    with pytest.raises(ValueError, match="memory_budget must be positive"):
        PyTorchGPURetriever(Model(), memory_budget=0)


def test_opening_does_not_read(tmp_path: Path) -> None:
    """A large index is there before its bytes are: opening takes a fraction of reading."""

    class Wide(Model):
        dimension = 1024

        def embed_query(self, text: str) -> Any:
            return np.arange(1024) + 1.0

    folder = make_index(tmp_path / "i", "a", 20_000, Wide.dimension)
    size = next(folder.glob("vectors-*")).stat().st_size
    with PyTorchGPURetriever(Wide(), device="cpu") as retriever:
        from torch_utils import memory_snapshot

        before = memory_snapshot().host.rss_bytes
        assert retriever.load(folder) == 20_000
        assert memory_snapshot().host.rss_bytes - before < size / 4
        assert retriever.search("x", top_k=1)


EVERYTHING = """
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
def test_memory_budget_is_kept_by_everything(tmp_path: Path) -> None:
    """Of a saved index: one query, 512, a filter, words, both, and changes; without it, none."""
    count, budget = 60_000, 32 << 20
    found = {}
    for options in ("0", str(budget), "None"):
        command = [sys.executable, "-c", EVERYTHING, str(tmp_path / "i"), str(count), options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        found[options] = list(map(int, done.stdout.split()))
    assert len(found[str(budget)]) == 7
    # Beside the budget: where the lines of the texts are, and where a search by words counts.
    assert max(found[str(budget)]) < budget + 32 * count
    assert max(found["None"]) > 4 * 384 * count
