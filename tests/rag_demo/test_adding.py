"""`rag-demo add`: files by any path, pipes, interruptions."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.support.rag_command import fail, info, rag_demo, search, succeed, texts


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    global TINY
    TINY = ("--model", str(tiny_model))
    monkeypatch.chdir(tmp_path)
    return tmp_path


TINY = ("", "")


def test_file_added_by_another_path_replaces_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "sub").mkdir()
    file = here / "sub" / "x.md"
    file.write_text("music is played")
    succeed("index", "sub", "--out", "i", *TINY)
    for path in ("sub/x.md", "./sub/../sub/x.md", file):
        succeed("add", "i", path)
    monkeypatch.chdir(here / "sub")
    file.write_text("music was played")
    succeed("add", "../i", "x.md")
    assert texts("../i") == ["music was played"]
    for folder, place in ((here, "sub/x.md:1"), (here / "sub", "x.md:1"), (here / "i", file)):
        monkeypatch.chdir(folder)
        (answer,) = search(here / "i", "music")[0]["results"]
        assert answer["place"].startswith(str(place))


def test_add_removes_texts_that_a_file_no_longer_has(here: Path) -> None:
    """Nor a folder; an unreadable file keeps its texts."""
    (here / "sub").mkdir()
    for name in ("empty.md", "broken.md", "stays.md", "gone.md"):
        (here / "sub" / name).write_text(f"words of {name}")
    succeed("index", "sub", "--out", "i", *TINY)
    (here / "sub" / "gone.md").unlink()
    (here / "sub" / "empty.md").write_text("")
    (here / "sub" / "broken.md").write_bytes(b"\xff\xfe\0")
    succeed("add", "i", "sub")
    assert texts("i") == ["words of broken.md", "words of stays.md"]


def test_add_to_an_incomplete_index_is_refused(here: Path) -> None:
    """The interrupted command can continue, and only that."""
    for name in ("a", "b"):
        (here / f"{name}.md").write_text(f"words of {name}")
    succeed("index", "a.md", "--out", "i", *TINY)
    with contextlib.closing(sqlite3.connect(here / "i" / "rag-demo-1.sqlite")) as database:
        database.execute("UPDATE manifest SET value = json_set(value, '$.finished', json('false'))")
        database.commit()
    assert not info("i")["finished"]
    assert "is incomplete" in rag_demo("search", "i", "words").stderr
    assert "run that command again" in fail("add", "i", "b.md")
    succeed("index", "a.md", "--out", "i", *TINY)
    succeed("add", "i", "b.md")
    assert info("i")["finished"] and texts("i") == ["words of a", "words of b"]
