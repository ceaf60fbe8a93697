"""Ingestion: streamed, interrupted and continued, and only what changed embedded again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
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
from rag_demo.errors import IndexFileError, OtherIndexError
from rag_demo.index import read_index, read_manifest
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
    assert len(list((tmp_path / "i").iterdir())) == 6


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_progress_within_a_long_document_counts(tmp_path: Path) -> None:
    """A book that is interrupted goes on where it was; the control embeds all of it again."""
    book = [Document("book", "".join(f"Sentence number {n}. " for n in range(60_000)), {})]
    chunks: list[list[str]] = []

    class Watched(Counting):
        stop_at = 2
        looked = 0

        def embed_documents(self, texts: Any) -> Any:
            if len(chunks) == self.stop_at:
                self.looked = len(read_index(tmp_path / "i").derived.get("pending.keys", ()))
                raise KeyboardInterrupt
            chunks.append(list(texts))
            return super().embed_documents(texts)

    first = Watched()
    assert not ingest(book, first, tmp_path / "i", checkpoint_s=0).finished
    done = [text for chunk in chunks for text in chunk]
    assert first.looked == len(chunks[0]) + len(chunks[1])  # Saved while the batch was on.
    assert ids(tmp_path / "i") == []
    second = Counting()
    assert ingest(book, second, tmp_path / "i").finished
    assert not set(done) & set(second.embedded)
    control = Counting()
    ingest(book, control, tmp_path / "control")
    assert sorted(control.embedded) == sorted([*done, *second.embedded])
    found, expected = read_index(tmp_path / "i"), read_index(tmp_path / "control")
    assert np.array_equal(found.vectors, expected.vectors)
    assert not [name for name in found.derived if name.startswith("pending.")]


def test_what_was_pending_waits_for_its_turn(tmp_path: Path) -> None:
    """It is kept while other documents are taken, and over another interruption."""
    book = Document("book", "".join(f"Sentence number {n}. " for n in range(60_000)), {})
    calls = 0

    class Stopped(Counting):
        def embed_documents(self, texts: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (3, 5):
                raise KeyboardInterrupt
            return super().embed_documents(texts)

    models = [Stopped(), Stopped(), Stopped()]
    sources = [[book], [*documents(BATCH), book], [*documents(BATCH), book]]
    for model, source in zip(models, sources, strict=True):
        finished = ingest(source, model, tmp_path / "i", checkpoint_s=0).finished
    assert finished
    embedded = [text for model in models for text in model.embedded]
    assert len(embedded) == len(set(embedded))


def test_an_error_saves_what_was_done(tmp_path: Path) -> None:
    """A source that breaks off, an id that stands twice: the next run goes on."""

    def broken() -> Iterator[Document]:
        yield from documents(2 * BATCH)
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        ingest(broken(), Counting(), tmp_path / "i")
    assert len(ids(tmp_path / "i")) == 2 * BATCH
    twice = [*documents(2 * BATCH), *documents(1)]
    with pytest.raises(IndexFileError, match="the id '0' stands twice"):
        ingest(twice, Counting(), tmp_path / "i")
    assert len(ids(tmp_path / "i")) == 2 * BATCH
    assert len(list((tmp_path / "i").iterdir())) == 5


TERMINATED = """
import os, signal, sys, pathlib
sys.path.insert(0, sys.argv[1])
from test_ingest import BATCH, Counting, documents
from rag_demo.ingest import ingest
def source():
    for document in documents(4 * BATCH):
        if document.id == str(2 * BATCH):
            os.kill(os.getpid(), signal.SIGTERM)
        yield document
ingest(source(), Counting(), pathlib.Path("i"))
"""


def test_sigterm(tmp_path: Path) -> None:
    """It saves as Ctrl-C does, ends with 128 + 15, and leaves nothing but the index."""
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    command = [sys.executable, "-c", TERMINATED, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "")
    assert len(ids(tmp_path / "i")) == 2 * BATCH
    assert len(list((tmp_path / "i").iterdir())) == 5
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_index_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Of another source or model, or by a program: nothing is embedded, and the error says how."""

    class Other(Counting):
        name = "other"

    folder = tmp_path / "i"
    ingest(documents(10), Counting(), folder, source="/books")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    for model, source, message in (
        (Counting(), "/letters", "holds the index of /books, not of /letters"),
        (Counting(), None, "holds the index of /books, not of what a program hands over"),
        (Other(), "/books", "holds vectors of the model 'counting', not of 'other'"),
    ):
        with pytest.raises(OtherIndexError, match=f"{message}; name another folder, or replace"):
            ingest(documents(10), model, folder, source=source)
        assert model.embedded == []
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {**files, "lock": b""} == {**before, "lock": b""}
    assert ingest(documents(10), Counting(), folder, source="/books").reused == 10
    replaced = ingest(documents(10), Other(), folder, source="/letters", replace=True)
    assert (replaced.embedded, replaced.reused) == (10, 0)
    manifest = read_manifest(folder)
    assert (manifest["model"], manifest["source"], manifest["finished"]) == (
        "other",
        "/letters",
        True,
    )


def test_passages_are_not_mixed_with_none(tmp_path: Path) -> None:
    """A long document of an index without them is embedded anew; a short one is not."""
    long = Document("long", "A sentence of some length, for a start. " * 60, {})
    short = Document("short", "Few words", {})
    with PyTorchGPURetriever(Counting(), device="cpu") as retriever:
        retriever.add([long.text, short.text], ids=["long", "short"])
        retriever.save(tmp_path / "i")
    model = Counting()
    done = ingest([long, short], model, tmp_path / "i")
    assert (done.embedded, done.reused) == (1, 1)
    assert short.text not in model.embedded
    assert len(read_index(tmp_path / "i").vectors) == len(model.embedded) + 1 > 4
    titled = long._replace(metadata={"title": "A title"})  # It is part of each passage.
    assert ingest([titled, short], Counting(), tmp_path / "i").embedded == 1
    assert ingest([titled, short], Counting(), tmp_path / "i").embedded == 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error that names the folder; the index stays that of the last save."""
    ingest(documents(10), Counting(), tmp_path / "i")

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def seek(self, position: int) -> int:
            return position

        def close(self) -> None:
            pass

    monkeypatch.setattr("rag_demo.index_builder._nameless", lambda folder: Full())
    with pytest.raises(IndexFileError, match=r"cannot be written to .*No space left on device"):
        ingest(documents(20), Counting(), tmp_path / "i")
    assert len(ids(tmp_path / "i")) == 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_end_while_the_last_save_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What was embedded is saved, though everything was seen; the next run embeds nothing."""
    import rag_demo.index_builder

    def interrupted(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rag_demo.index_builder, "derived_arrays", interrupted)
        with contextlib.nullcontext() if error is KeyboardInterrupt else pytest.raises(error):
            assert not ingest(documents(20), Counting(), tmp_path).finished
    assert ids(tmp_path) == [str(n) for n in range(20)]
    again = ingest(documents(20), Counting(), tmp_path)
    assert (again.embedded, again.reused, again.finished) == (0, 20, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("a", "text", {}), "is no Document"),
        (None, "is no Document"),
        (Document(1, "text", {}), "the id of"),  # type: ignore[arg-type]
        (Document("a", None, {}), "the text of"),  # type: ignore[arg-type]
        (Document("a", "text", None), "must be a mapping"),  # type: ignore[arg-type]
        (Document("a", "text", {1: 2}), "keys are text"),  # type: ignore[dict-item]
        (Document("a", "text", {"n": np.int64(1)}), "JSON has"),
        (
            Document("a", "text", {"n": json.loads("[" * 150 + "]" * 150)}),
            "nested more than 100 deep",
        ),
    ],
)
def test_what_is_no_document(tmp_path: Path, wrong: Any, message: str) -> None:
    """One error before it is embedded; what came before is saved, and can be searched."""
    with pytest.raises(IndexFileError, match=message):
        ingest(itertools.chain(documents(BATCH), [wrong]), Counting(), tmp_path / "i")
    with PyTorchGPURetriever(Counting()) as retriever:
        assert retriever.load(tmp_path / "i") == BATCH
        assert retriever.search("text", 1, mode="hybrid")
