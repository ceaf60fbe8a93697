"""Ingestion: streamed, interrupted and continued, and only what changed embedded again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import IMPORT_PATH
from rag_demo import PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError
from rag_demo.index import read_index
from rag_demo.ingest import BATCH, ingest
from rag_demo.storage.writing import lock


class Counting:
    """An embedding model that says what it was asked for."""

    name = "counting"
    dimension = 16

    def __init__(self, fail_at: int | None = None) -> None:
        self.embedded: list[str] = []
        self._fail_at = fail_at

    def embed_documents(self, texts: Any) -> Any:
        if self._fail_at is not None and len(self.embedded) >= self._fail_at:
            raise KeyboardInterrupt
        self.embedded += texts
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Any:
        return np.random.default_rng(len(text) + sum(map(ord, text))).standard_normal(16)


def documents(count: int, changed: int = -1) -> Iterator[Document]:
    for n in range(count):
        yield Document(str(n), f"text {n}" + (" new" if n == changed else ""), {"n": n})


def ids(folder: Path) -> list[str]:
    index = read_index(folder)
    index.check_vectors()
    return [document.id for document in index.documents]


def test_only_what_changed_is_embedded_again(tmp_path: Path) -> None:
    """A changed text, a new one, one that went; metadata are taken as they are now."""
    ingest(documents(100), Counting(), tmp_path / "i")
    model = Counting()
    changed = [d for d in documents(101, changed=7) if d.id != "50"]
    changed[3].metadata["n"] = "three"
    done = ingest(changed, model, tmp_path / "i")
    assert model.embedded == ["text 7 new", "text 100"]
    assert (done.embedded, done.reused, done.finished) == (2, 98, True)
    assert ids(tmp_path / "i") == [d.id for d in changed]
    assert read_index(tmp_path / "i").documents[3].metadata == {"n": "three"}
    with PyTorchGPURetriever(Counting(), device="cpu") as retriever:
        retriever.load(tmp_path / "i")
        for text in ("text 7 new", "text 99", "text 100"):
            assert retriever.search(text, top_k=1)[0].text == text


def test_ctrl_c_and_again(tmp_path: Path) -> None:
    """What was done is a usable index, and the next run goes on from it."""
    count = 3 * BATCH
    first = Counting(fail_at=2 * BATCH)
    done = ingest(documents(count), first, tmp_path / "i")
    assert not done.finished
    assert len(ids(tmp_path / "i")) == 2 * BATCH
    second = Counting()
    assert ingest(documents(count), second, tmp_path / "i").finished
    assert len(second.embedded) == BATCH
    assert ids(tmp_path / "i") == [str(n) for n in range(count)]
    assert len(list((tmp_path / "i").iterdir())) == 5


def test_ctrl_c_keeps_what_was_not_reached(tmp_path: Path) -> None:
    """Indexing again, and stopping early, does not lose the rest of the index."""
    ingest(documents(3 * BATCH), Counting(), tmp_path / "i")
    changed = (Document(d.id, d.text + "!", d.metadata) for d in documents(3 * BATCH))
    assert not ingest(changed, Counting(fail_at=BATCH), tmp_path / "i").finished
    texts = {document.id: document.text for document in read_index(tmp_path / "i").documents}
    assert len(texts) == 3 * BATCH
    assert sum(text.endswith("!") for text in texts.values()) == BATCH


def test_checkpoints(tmp_path: Path) -> None:
    """A run that is killed loses no more than what came after the last save."""
    seen: list[int] = []

    def watched() -> Iterator[Document]:
        for document in documents(4 * BATCH):
            if document.id == str(3 * BATCH):
                seen.append(len(ids(tmp_path / "i")))
            yield document

    ingest(watched(), Counting(), tmp_path / "i", checkpoint_s=0)
    assert seen == [3 * BATCH]
    assert len(ids(tmp_path / "i")) == 4 * BATCH


def test_one_writer(tmp_path: Path) -> None:
    """A second ingestion into the same folder is refused before any work."""
    ingest(documents(10), Counting(), tmp_path / "i")
    model = Counting()
    with lock(tmp_path / "i"), pytest.raises(IndexFileError, match="written by another process"):
        ingest(documents(11), model, tmp_path / "i")
    assert model.embedded == []


def test_memory_is_bounded(tmp_path: Path) -> None:
    """100,000 documents of a kilobyte: the growth is a fraction of what they take."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_ingest import Counting
from rag_demo.documents.document import Document
from rag_demo.ingest import ingest
from torch_utils import memory_snapshot
import numpy as np, pathlib, resource
class Fast(Counting):
    def embed_documents(self, texts):
        return np.ones((len(texts), 16), np.float32)
ingest((Document(str(n), "x" * 1000, {{}}) for n in range(2100)), Fast(), pathlib.Path("warm"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ingest((Document(str(n), "x" * 1000, {{}}) for n in range(100_000)), Fast(), pathlib.Path("i"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40e6


def spooled(pid: int) -> Iterator[int]:
    """Yield the sizes of the nameless files that a process has open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "/#" in os.readlink(link) and "(deleted)" in os.readlink(link):
                yield link.stat().st_size


def test_ctrl_c_on_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    """Exit code 130, one line that says how to go on, and the same command does."""
    lines = [f'{{"text": "document number {n} about memory", "id": "{n}"}}' for n in range(60_000)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "rag_demo", "index", "many.jsonl", "--out", "i"]
    command += ["--model", str(tiny_model), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            # The vectors of two batches are written: the first one counts.
            if max(spooled(process.pid), default=0) >= 2 * BATCH * 32 * 4:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert said.startswith("rag-demo: interrupted; ")
    assert "the same command goes on from there" in said
    assert len(ids(tmp_path / "i")) >= BATCH
