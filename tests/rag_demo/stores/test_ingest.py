"""`rag-demo index` and `add` again and again: updates, interruptions, concurrent runs."""

import contextlib
import fcntl
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel
from rag_demo.cli import main
from tests.support.interrupts import Place, interrupt_everywhere
from tests.support.programs import IMPORT_PATH
from tests.support.rag_command import (
    IMPORT_MAIN,
    documents,
    fail,
    info,
    rag_demo,
    search,
    succeed,
    write_lines,
)
from tests.support.retriever_kinds import OnCpu
from tests.support.waiting import wait_for

BATCHES = 4500  # Documents: more than a pipe holds, so some are embedded before the last are read.


@pytest.fixture
def command(tiny_model: Path, tmp_path: Path) -> list[Any]:
    options = ("--out", tmp_path / "i", "--model", tiny_model, "--device", "cpu", "--no-cache")
    return ["index", tmp_path / "s.jsonl", *options]


def write(tmp_path: Path, count: int, **changed: str) -> None:
    texts = {str(n): f"text {n}" for n in range(count)} | changed
    records = [{"id": name, "text": text} for name, text in texts.items() if text]
    write_lines(tmp_path / "s.jsonl", records)


def texts(folder: Path) -> dict[str, str]:
    """Return the texts by the ids that they have in the source."""
    return {name.rpartition("#")[2]: each["text"] for name, each in documents(folder).items()}


def test_index_command_updates_changed_new_and_removed_texts(command: Any, tmp_path: Path) -> None:
    write(tmp_path, 100)
    assert "unchanged" not in succeed(*command)
    write(tmp_path, 101, **{"7": "text 7 new", "50": ""})
    assert "98 of them unchanged" in succeed(*command)
    expected = {str(n): f"text {n}" for n in range(101) if n != 50} | {"7": "text 7 new"}
    assert texts(tmp_path / "i") == expected
    for text in ("text 7 new", "text 99", "text 100"):
        assert best(tmp_path / "i", text)["text"] == text


def test_changed_title_and_metadata_are_indexed_again(command: Any, tmp_path: Path) -> None:
    """A title is embedded with each passage. As text, 1 and True differ."""
    record: dict[str, Any] = {"id": "7", "text": "A sentence of some length. " * 40}
    changes: tuple[dict[str, Any], ...] = ({}, {"title": "T"}, {"n": 1}, {"n": True})
    for change in changes:
        record |= change
        write_lines(tmp_path / "s.jsonl", [record])
        assert ("1 of them unchanged" in succeed(*command)) == ("n" in change)
        (document,) = documents(tmp_path / "i").values()
        assert document["metadata"].get("n") is record.get("n")


def best(folder: Path, text: str) -> dict[str, Any]:
    (found,) = search(folder, text, "--mode", "dense", "--top-k", "1")
    result: dict[str, Any] = found["results"][0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_interrupted_run_goes_on(command: Any, tmp_path: Path, number: int, code: int) -> None:
    lines = [f'{{"id": "{n}", "text": "text {n}"}}\n' for n in range(BATCHES)]
    command[1] = "-"
    with subprocess.Popen(
        [sys.executable, "-c", f"{IMPORT_MAIN}; main()", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
    ) as process:
        assert process.stdin
        process.stdin.writelines(lines[:-100])
        process.stdin.flush()
        wait_for(lambda: rag_demo("info", tmp_path / "i").returncode == 0)
        process.send_signal(number)
        _, stderr = process.communicate()
    assert process.returncode == code, stderr
    again = "rag-demo: interrupted; run the same command again to continue\n"
    assert stderr == (again if number == signal.SIGINT else "")
    part = texts(tmp_path / "i")
    assert 512 <= len(part) < BATCHES
    assert info(tmp_path / "i")["finished"] is False
    assert f"{len(part)} of them unchanged" in succeed(*command, stdin="".join(lines))
    assert len(texts(tmp_path / "i")) == BATCHES
    assert info(tmp_path / "i")["finished"] is True


def test_second_run_into_a_folder_is_refused(command: Any, tmp_path: Path) -> None:
    write(tmp_path, 10)
    succeed(*command)
    lock = os.open(tmp_path / "i", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for refused in (command, ["delete", tmp_path / "i", "3"]):
        assert f"another process is writing into '{tmp_path / 'i'}'" in fail(*refused)
    os.close(lock)
    succeed(*command)


@pytest.mark.slow
def test_ingestion_interrupted_anywhere_stays_consistent(command: Any, tmp_path: Path) -> None:
    """Each text is that of one version, with its own vector; the next run completes it."""
    write(tmp_path, 18)
    succeed(*command)
    folder, before, states = tmp_path / "i", tmp_path / "before", set()
    old = texts(folder)
    folder.rename(before)
    changes = {str(n): f"changed text {n}" for n in (0, 3, 6, 18)}
    write(tmp_path, 18, **changes, **{"5": ""})
    new = {name: text for name, text in (old | changes).items() if name != "5"}

    def check(place: Place) -> None:
        shutil.copytree(before, folder)
        place.run(lambda: rag_demo(*command))
        succeed("verify", folder)
        found = texts(folder)
        assert set(found) >= set(old) & set(new), "documents are gone"
        assert all(text in (old.get(name), new.get(name)) for name, text in found.items())
        states.add(frozenset(found.items()))
        with EmbeddingModel(command[5], device="cpu") as model, OnCpu(model) as retriever:
            retriever.load(folder)
            results = retriever.search("text", 99, mode="dense")
            expected = model.embed_documents([r.text for r in results]) @ model.embed_query("text")
        assert [r.score for r in results] == pytest.approx(expected, abs=5e-4)
        succeed(*command)
        assert texts(folder) == new
        shutil.rmtree(folder)

    interrupt_everywhere(check, package="rag_demo", minimum=10, at_most=20)
    assert len(states) > 1


@pytest.mark.slow
def test_ingestion_takes_the_memory_of_a_batch(command: Any, tmp_path: Path) -> None:
    lines = [{"text": f"note {n}", "note": "x" * 5000} for n in range(20_000)]  # 100 MB.
    write_lines(tmp_path / "s.jsonl", lines[:10])
    succeed(*command)  # Imports what is needed.
    write_lines(tmp_path / "s.jsonl", lines)
    tracemalloc.start()
    try:
        succeed(*command)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40e6


def test_path_of_a_file_does_not_matter(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "sub" / "x.md"
    file.parent.mkdir()
    file.write_text("music is played")
    (tmp_path / "link").symlink_to(file.parent)
    monkeypatch.chdir(tmp_path)
    succeed("index", "link", "--out", "i", "--model", tiny_model)
    for path in ("sub", "sub/x.md", "./sub/../sub/x.md", "link/x.md", file):
        succeed("add", "i", path)
    monkeypatch.chdir(tmp_path / "sub")
    file.write_text("music was played")
    succeed("add", "../i", "x.md")
    assert list(texts(Path("../i")).values()) == ["music was played"]
    for folder, place in ((tmp_path, "sub/x.md:1"), (tmp_path / "sub", "x.md:1")):
        monkeypatch.chdir(folder)
        assert best(tmp_path / "i", "music")["place"].startswith(place)


def test_add_removes_texts_that_a_folder_no_longer_has(tiny_model: Path, tmp_path: Path) -> None:
    """An unreadable file keeps its texts."""
    folder = tmp_path / "sub"
    folder.mkdir()
    for name in ("empty.md", "broken.md", "stays.md", "gone.md"):
        (folder / name).write_text(f"words of {name}")
    succeed("index", folder, "--out", tmp_path / "i", "--model", tiny_model)
    (folder / "gone.md").unlink()
    (folder / "empty.md").write_text("")
    (folder / "broken.md").write_bytes(b"\xff\xfe\0")
    succeed("add", tmp_path / "i", folder)
    found = sorted(each["text"] for each in documents(tmp_path / "i").values())
    assert found == ["words of broken.md", "words of stays.md"]


def test_add_to_an_incomplete_index_is_refused(command: Any, tmp_path: Path) -> None:
    """The interrupted command can continue, and only that. It may also still run."""
    write(tmp_path, 1)
    write_lines(tmp_path / "more.jsonl", [{"id": "more", "text": "one more"}])
    folder = tmp_path / "i"
    succeed(*command)
    with contextlib.closing(sqlite3.connect(folder / "rag-demo-1.sqlite")) as database, database:
        database.execute("UPDATE manifest SET value = json_set(value, '$.finished', json('false'))")
    with EmbeddingModel(info(folder)["model"]) as model, OnCpu(model) as retriever:
        retriever.load(folder)
        retriever.save(tmp_path / "copy")
    assert not info(folder)["finished"] and not info(tmp_path / "copy")["finished"]
    assert "is incomplete" in rag_demo("search", folder, "words").stderr
    refused = fail("add", folder, tmp_path / "more.jsonl")
    assert "still runs or was interrupted" in refused and "run that command again" in refused
    succeed(*command)
    succeed("add", folder, tmp_path / "more.jsonl")
    assert info(folder)["finished"] and len(texts(folder)) == 2


def test_add_uses_the_state_after_its_start(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A service may change the index while the command reads its input and loads the model."""
    write(tmp_path, 2)
    succeed(*command)
    (deleted,) = (each for each in documents(tmp_path / "i") if "1" in each)

    class Lines(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            rag_demo("delete", tmp_path / "i", deleted)
            return super().readinto(buffer)

    raw: Any = Lines(b'{"id": "new", "text": "new"}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))
    monkeypatch.setattr(sys, "argv", ["rag-demo", "add", str(tmp_path / "i"), "-"])
    with contextlib.suppress(SystemExit):
        main()
    assert set(texts(tmp_path / "i")) == {"0", "new"}
