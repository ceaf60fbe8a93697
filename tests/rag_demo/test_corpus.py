"""How `rag-demo index` reads folders, files and JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.pdf import pdf_of
from tests.support.programs import run_forked
from tests.support.rag_command import documents, fail, rag_demo, succeed, write_lines


@pytest.fixture(autouse=True)
def here(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    global TINY
    TINY = ("--model", str(tiny_model))
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


TINY = ("", "")


def read(source: str | Path, *options: str) -> tuple[dict[str, Any], str]:
    """Index a source; return its documents by id, and what the command says on stderr."""
    result = rag_demo("index", source, "--out", "index", "--yes", *TINY, *options)
    assert result.returncode == 0, str(result)
    return documents("index"), result.stderr


def error(source: str | Path) -> str:
    return fail("index", source, "--out", "index", "--yes", *TINY)


def test_folder_is_read(tmp_path: Path) -> None:
    """Every known kind of file, without markup; hidden and other files are skipped."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "README").write_text("Read me first.")
    (tmp_path / "a.markdown").write_bytes(b"\xef\xbb\xbf\r\n# Caches\r\n\r\nunused memory\r\n")
    (tmp_path / "deep" / "b.txt").write_text("Plain words about the garbage collector.\n")
    (tmp_path / "c.HTML").write_text("<style>p {color: red}</style><p>Visible &amp; readable.")
    (tmp_path / "d.py").write_text('def f():\n    """Return what the caller asked for."""\n')
    cells = [{"cell_type": "code", "source": "print('the first cell is long')", "outputs": ["x"]}]
    (tmp_path / "e.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "f.jsonl").write_text('{"id": 1, "text": "a"}\nbroken\n{"id": 1, "text": "b"}\n')
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("should never be seen by anyone\n")
    found, said = read(tmp_path)
    by_name = {Path(each["metadata"]["path"]).name: each for each in found.values()}
    assert set(by_name) == {"README", "a.markdown", "b.txt", "c.HTML", "d.py", "e.ipynb", "f.jsonl"}
    assert by_name["a.markdown"]["metadata"]["title"] == "Caches"
    assert by_name["a.markdown"]["text"] == "# Caches\n\nunused memory"
    assert by_name["c.HTML"]["text"] == "Visible & readable."
    assert by_name["e.ipynb"]["metadata"]["cell"] == 1
    assert found["1"]["metadata"]["line"] == 1
    assert "1 of an unsupported type (image.png)" in said
    assert "2 not a document (f.jsonl:2: not JSON" in said


def test_json_lines_are_read(tmp_path: Path) -> None:
    """Text, title and id have their meaning; other fields are metadata."""
    path = tmp_path / "corpus.jsonl"
    records: list[dict[str, Any]] = [
        {"_id": "7", "title": "T", "text": "body", "lang": "en"},
        {"text": "other"},
        {"id": None, "_id": 0, "text": "a"},
        {"id": None, "text": "b"},
    ]
    found, _ = read(write_lines(path, records))
    assert set(found) == {"7", "corpus.jsonl#2", "0", "corpus.jsonl#4"}
    assert found["7"]["text"] == "T\nbody"
    metadata = {"title": "T", "lang": "en", "path": str(path), "line": 1}
    assert found["7"]["metadata"].items() >= metadata.items()
    assert "id" not in found["corpus.jsonl#4"]["metadata"]


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ('{"text": "a"}\n{broken', ["corpus.jsonl:2: not JSON"]),
        (
            '{"body": "a", "n": 1}',
            [":1: expected ", "\"text\", got 'the fields body, n'", "--text-field"],
        ),
        ("{}", [":1: expected ", "got 'the fields '"]),
        ("[1]", [":1: expected an object"]),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', [":2: the id '1' appears twice"]),
        ('{"id": [1], "text": "a"}', [":1: the id must be a string or a number, got [1]"]),
        ('{"id": true, "text": "a"}', [":1: the id must be", "true"]),
        (f'{{"text": "a", "m": {"[" * 400}{"]" * 400}}}', [":1: ", "nested more than 100 deep"]),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, content: str, messages: list[str]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    said = error(path)
    assert all(message in said for message in messages), said


def test_damaged_pdf_is_skipped(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="the extra pdf is not installed")
    (tmp_path / "a.pdf").write_bytes(pdf_of("The first page.", "The port is on the second page."))
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 damaged")
    _, said = read(tmp_path)
    assert "a.pdf#page=1 to 2\t" in succeed("search", "index", "port", "--model", TINY[1])
    assert "1 not a valid PDF (b.pdf: " in said


def command(*arguments: str | Path, before: str) -> Any:
    """Run `rag-demo` in a process of its own, after some lines that change that process."""
    program = f"{before}\nfrom rag_demo.cli import main\nmain()\n"
    return run_forked(program, *map(str, arguments), quick_end=True)


# Tests may run as root, who may read everything: so an audit hook refuses.
REFUSING = """
import os, sys

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        if os.path.basename(str(arguments[0])) in ("secret.txt", "locked"):
            raise PermissionError(13, "Permission denied", str(arguments[0]))

sys.addaudithook(refuse)
"""


def test_unreadable_files_are_listed(tmp_path: Path) -> None:
    """Files, folders, dangling links, pipes, and files that are too large."""
    (tmp_path / "good.txt").write_text("words")
    (tmp_path / "secret.txt").write_text("words")
    (tmp_path / "locked").mkdir()
    (tmp_path / "large.md").write_bytes(b"x" * (65 << 20))
    (tmp_path / "nothing.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / b"bad\xff.txt".decode("utf-8", "surrogateescape")).write_text("a bad name")
    out = tmp_path.with_name("index")
    result = command("index", tmp_path, "--out", out, *TINY, before=REFUSING)
    assert result.returncode == 0, str(result)
    texts = sorted(each["text"] for each in documents(out).values())
    assert texts == ["a bad name", "words"]
    for named in (
        "locked/: Permission denied",
        "secret.txt: Permission denied",
        "nothing.txt: No such file",
        "1 not a regular file (pipe.txt)",
        "1 a link (round/)",
        "MB (large.md)",
    ):
        assert named in result.stderr, named


def test_include_and_exclude_select_files(tmp_path: Path) -> None:
    """An included file of any suffix is read."""
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "a.log", "sub/b.md", "sub/c.txt"):
        (tmp_path / name).write_text(f"words of {name}")

    def sources(*options: str) -> set[str]:
        found, _ = read(tmp_path, *options)
        return {each["metadata"]["source"] for each in found.values()}

    included = sources("--include", "*.log", "--include", "sub/*")
    assert included == {"a.log", "sub/b.md", "sub/c.txt"}
    assert sources("--exclude", "sub") == {"a.md"}
    assert sources("--exclude", "*.txt") == {"a.md", "sub/b.md"}


def test_index_within_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    for _ in range(2):
        result = rag_demo("index", tmp_path, "--out", tmp_path / "index", *TINY)
        assert result.returncode == 0, str(result)
    assert [each["text"] for each in documents(tmp_path / "index").values()] == ["words"]
    assert "1 a saved index (index/)" in result.stderr
