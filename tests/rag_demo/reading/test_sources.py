"""`read_source`: which files of a folder are read, what is skipped, and lines of JSON."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rag_demo import Document, RagDemoError
from rag_demo.reading.sources import Reading, Skipped, read_source
from tests.support.rag_command import write_lines


def read(source: Path | str, **options: Any) -> tuple[dict[str, Document], str]:
    """Return the documents by id, and what was skipped."""
    skipped = Skipped()
    found = {each.id: each for each in read_source(str(source), skipped, Reading(**options))}
    return found, str(skipped)


def names(folder: Path, **options: Any) -> set[str]:
    found, _ = read(folder, **options)
    return {each.metadata["source"] for each in found.values()}


def test_files_of_known_types_are_read(tmp_path: Path) -> None:
    """Subfolders too; hidden files, caches, links to folders and saved indexes are not."""
    known = {"README", "a.md", "b.markdown", "c.txt", "d.py", "e.rst", "f.HTML", "deep/g.txt"}
    for name in (*known, ".hidden.txt", ".git/a.txt", "node_modules/a.txt", "x.png", "index/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"words of {name}")
    (tmp_path / "index" / "rag-demo-1.sqlite").write_text("")
    (tmp_path / "round").symlink_to(tmp_path)
    found, skipped = read(tmp_path)
    assert {each.metadata["source"] for each in found.values()} == known
    assert {each.metadata["path"] for each in found.values()} == {
        str(tmp_path / name) for name in known
    }
    assert found["c.txt#0"].metadata["line"] == 1
    for part in (
        "skipped 3: ",
        "1 a link (round/)",
        "1 a saved index (index/)",
        "1 of an unsupported type (x.png)",
    ):
        assert part in skipped


def test_patterns_select_files_and_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "a.log", "b.csv", "sub/b.md", "sub/c.txt"):
        (tmp_path / name).write_text(f"words of {name}")
    included = names(tmp_path, include=("*.log", "sub/*"))
    assert included == {"a.log", "sub/b.md", "sub/c.txt"}  # Of any type.
    assert names(tmp_path, exclude=("sub",)) == {"a.md"}
    assert names(tmp_path, exclude=("*.txt",)) == {"a.md", "sub/b.md"}
    assert names(tmp_path, as_text=("*.csv",)) == {"a.md", "b.csv", "sub/b.md", "sub/c.txt"}
    (tmp_path / "x.html").write_text("<p>marked")
    found, _ = read(tmp_path / "x.html", as_text=("*.html",))
    assert found["x.html#0"].text == "<p>marked"


def test_unreadable_files_are_skipped_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # Tests may run as root, who may read everything.
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (tmp_path / "locked").mkdir()
    (tmp_path / "large.md").write_bytes(b"x" * (65 << 20))
    (tmp_path / "nothing.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / b"bad\xff.txt".decode("utf-8", "surrogateescape")).write_text("a bad name")
    contents = {
        "a.txt": (b"caf\xe9", "not UTF-8 text"),
        "a.html": (b"<p>caf\xe9", "not UTF-8 text"),
        "b.html": (b"<meta charset=shift_jis><p>\x80\xff", "not shift_jis text"),
        "b.txt": (b"a\0b", "with a NUL byte, so not text"),
        "c.html": (b"<ul><li>" * 2_000 + b"deep", "nested too deep"),
        "a.docx": (b"PK", "of an unsupported type"),
        "d.html": (b"<!-- nothing else -->", "without text"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    found, skipped = read(tmp_path)
    assert [each.text for each in found.values()] == ["a bad name"]
    for part in (
        "locked/: Permission denied",
        "nothing.txt: No such file",
        "1 not a regular file (pipe.txt)",
        "MB (large.md)",
        "not UTF-8 text (a.html, a.txt)",
        *(f"{why} ({name})" for name, (_, why) in contents.items() if not name.startswith("a.")),
    ):
        assert part in skipped, part


def test_json_lines_are_read(tmp_path: Path) -> None:
    """Text, title and id have their meaning; other fields are metadata."""
    records: list[dict[str, Any]] = [
        {"_id": "7", "title": "T", "text": "body", "lang": "en"},
        {"text": "other"},
        {"id": None, "_id": 0, "text": "a"},
    ]
    path = write_lines(tmp_path / "corpus.jsonl", records)
    found, _ = read(path)
    assert set(found) == {"7", "corpus.jsonl#2", "0"}
    assert found["7"].text == "T\nbody"
    assert found["7"].metadata == {
        "title": "T", "lang": "en", "path": str(path), "line": 1, "source": "corpus.jsonl:1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{broken', "corpus.jsonl:2: not JSON"),
        ('{"body": "a", "n": 1}', r":1: expected .* got 'the fields body, n'; .* --text-field"),
        ("[1]", ":1: expected an object"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', ":2: the id '1' appears twice"),
        ('{"id": [1], "text": "a"}', r":1: the id must be a string or a number, got \[1\]"),
        (f'{{"text": "a", "m": {"[" * 400}{"]" * 400}}}', ":1: .*nested more than 100 deep"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    """In a folder it is skipped."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(RagDemoError, match=message):
        read(path)
    _, skipped = read(tmp_path)
    assert "1 not a document (corpus.jsonl:" in skipped


def test_id_of_a_line_does_not_depend_on_how_its_file_is_read(tmp_path: Path) -> None:
    """An id that an earlier file of the folder has gets a mark."""
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"id": "x1", "text": name}, {"text": "no id"}])
    alone, _ = read(tmp_path / "a.jsonl")
    assert set(alone) == {"x1", "a.jsonl#2"}
    found = {name: each.text for name, each in read(tmp_path)[0].items()}
    assert found == {"x1": "a", "a.jsonl#2": "no id", "x1~": "b", "b.jsonl#2": "no id"}


def test_mark_before_an_empty_line_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"text": "a"}\n')
    assert [each.text for each in read(path)[0].values()] == ["a"]
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert [each.text for each in read("-")[0].values()] == ["a"]
