"""`rag-demo add`: files by any path, pipes, interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import Result, run_forked
from support.rag_command import fail, info, search, succeed, texts, write_lines


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
    """An unreadable file keeps its texts."""
    (here / "sub").mkdir()
    for name in ("empty.md", "broken.md", "stays.md"):
        (here / "sub" / name).write_text(f"words of {name}")
    succeed("index", "sub", "--out", "i", *TINY)
    (here / "sub" / "empty.md").write_text("")
    (here / "sub" / "broken.md").write_bytes(b"\xff\xfe\0")
    succeed("add", "i", "sub")
    assert texts("i") == ["words of broken.md", "words of stays.md"]


INTERRUPTED = """
import signal, sys

def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith("last.md"):
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
from rag_demo.cli import main
main()
"""


def interrupted(*arguments: str | Path) -> Result:
    """Run a command that gets a Ctrl-C when it opens the last file; it has another folder."""
    result = run_forked(INTERRUPTED, *map(str, arguments), quick_end=True)
    assert result.returncode == 130, str(result)
    return result


@pytest.mark.slow
def test_add_to_an_incomplete_index_is_refused(here: Path) -> None:
    """The interrupted command can continue."""
    for name in ("a", "b"):
        (here / name).mkdir()
        write_lines(here / name / "1.jsonl", [{"text": f"text {n} of {name}"} for n in range(2100)])
        (here / name / "last.md").write_text(f"last words of {name}")
    (here / "c.md").write_text("other words")
    interrupted("index", here / "a", "--out", here / "i", *TINY)
    some = info("i")
    assert not some["finished"] and 0 < some["texts"] < 2101
    assert "run that command again" in fail("add", "i", "c.md")
    succeed("index", "a", "--out", "i", *TINY)
    assert info("i")["finished"] and info("i")["texts"] == 2101
    result = interrupted("add", here / "i", here / "b")
    assert result.stderr.endswith("interrupted; run the same command again to continue\n")
    assert not info("i")["finished"] and 2101 < info("i")["texts"] < 4202
    assert "run that command again" in fail("add", "i", "c.md")
    succeed("add", "i", "b")
    assert info("i")["finished"] and info("i")["texts"] == 4202


def test_file_that_is_gone_from_an_added_folder_is_removed(here: Path) -> None:
    for name in ("one/a.md", "two/b.md", "two/c.md"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(f"words of {name}")
    succeed("index", "one", "--out", "i", *TINY)
    succeed("add", "i", "two")
    (here / "two" / "b.md").unlink()
    (here / "one" / "a.md").unlink()
    succeed("add", "i", "two")
    assert texts("i") == ["words of one/a.md", "words of two/c.md"]
