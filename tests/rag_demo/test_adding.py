"""What an index is of, command after command: files known by any path, pipes, interruptions."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from letters import Letters, letters  # noqa: F401  (a fixture)

import rag_demo.documents.files
from rag_demo.commands import run
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import IndexFileError, RagDemoError
from rag_demo.index import read_index, read_manifest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(folder: str) -> list[str]:
    return sorted(document.text for document in read_index(Path(folder)).documents)


def pipe(monkeypatch: pytest.MonkeyPatch, content: str, *command: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert run(list(command)) == 0


def test_one_file_by_any_path(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Added again by another path, from another folder, it replaces itself; so in answers too."""
    (here / "sub").mkdir()
    file = here / "sub" / "x.md"
    file.write_text("music is played")
    assert run(["index", "sub", "--out", "i"]) == 0
    for path in ("sub/x.md", "./sub/../sub/x.md", str(file)):
        assert run(["add", "i", path]) == 0
    monkeypatch.chdir(here / "sub")
    file.write_text("music was played")
    assert run(["add", "../i", "x.md"]) == 0
    assert texts("../i") == ["music was played"]
    for folder, place in ((here, "sub/x.md:1"), (here / "sub", "x.md:1"), (here / "i", file)):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert run(["search", str(here / "i"), "music"]) == 0
        assert capsys.readouterr().out.split("\t")[2].startswith(str(place))


def test_control_paths_as_they_were_given(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """Names that depend on the folder make two files of one."""
    for module in (rag_demo.corpus, rag_demo.commands.indexing):
        monkeypatch.setattr(module, "full_path", str)
    (here / "x.md").write_text("music is played")
    run(["index", "x.md", "--out", "i"])
    run(["add", "i", str(here / "x.md")])
    assert texts("i") == ["music is played"] * 2


def test_a_path_in_a_record_is_no_file(here: Path) -> None:
    """Records that tell of the same path are different texts; whatever "path" is."""
    first = [{"id": "a", "text": "alpha", "path": "a.py"}, {"id": "b", "text": "b", "path": ["x"]}]
    second = [{"id": "c", "text": "gamma", "path": "a.py"}, {"id": "d", "text": "d", "path": {}}]
    for name, records in (("1.jsonl", first), ("2.jsonl", second)):
        (here / name).write_text("\n".join(map(json.dumps, records)))
    assert run(["index", "1.jsonl", "--out", "i"]) == 0
    assert run(["add", "i", "2.jsonl"]) == 0
    assert texts("i") == ["alpha", "b", "d", "gamma"]


def test_what_a_file_lost_is_gone(here: Path) -> None:
    """A file that was read and holds nothing now; but not one that could not be read."""
    (here / "sub").mkdir()
    for name in ("empty.md", "broken.md", "stays.md"):
        (here / "sub" / name).write_text(f"words of {name}")
    assert run(["index", "sub", "--out", "i"]) == 0
    (here / "sub" / "empty.md").write_text("")
    (here / "sub" / "broken.md").write_bytes(b"\xff\xfe\0")
    assert run(["add", "i", "sub"]) == 0
    assert texts("i") == ["words of broken.md", "words of stays.md"]


def test_two_pipes_are_two_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text again is the same source; another one replaces nothing unasked."""
    for _ in range(2):
        pipe(monkeypatch, "one text of some length", "index", "-", "--out", "i")
    with pytest.raises(RagDemoError, match="--yes"):
        pipe(monkeypatch, "another text of some length", "index", "-", "--out", "i")
    assert texts("i") == ["one text of some length"]
    lines = '{"text": "first"}\n'
    pipe(monkeypatch, lines, "index", "-", "--out", "i", "--yes")
    pipe(monkeypatch, lines + '{"text": "second"}\n', "index", "-", "--out", "i")
    assert texts("i") == ["first", "second"]
    pipe(monkeypatch, "a third", "add", "i", "-")
    with pytest.raises(RagDemoError, match="--yes"):
        pipe(monkeypatch, lines, "index", "-", "--out", "i")
    assert len(texts("i")) == 3


def test_the_names_of_sources_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something is added, the manifest can be read."""
    monkeypatch.setattr("rag_demo.commands.indexing._MOST_CHARS", 60)
    pipe(monkeypatch, "text number 0", "index", "-", "--out", "i")
    for number in range(1, 12):
        pipe(monkeypatch, f"text number {number}", "add", "i", "-")
    source = read_manifest(Path("i"))["source"]
    assert source.startswith("standard input (")
    assert source.endswith(" + others")
    assert len(source) < 80
    assert len(texts("i")) == 12


def test_a_part_is_not_added_to(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would pass for all of it; the command that was interrupted goes on, `index` or `add`."""
    for name in ("a", "b", "c"):
        (here / f"{name}.md").write_text(f"words of {name}")

    def interrupted(self: Letters, texts: list[str]) -> Any:
        if "words of b" in texts:
            raise KeyboardInterrupt
        return embed(self, texts)

    embed = Letters.embed_documents
    monkeypatch.setattr("rag_demo.ingest.BATCH", 1)
    with monkeypatch.context() as patched:
        patched.setattr(Letters, "embed_documents", interrupted)
        assert run(["index", str(here), "--out", "i"]) == 130
    assert texts("i") == ["words of a"]
    with pytest.raises(IndexFileError, match="repeat that command"):
        run(["add", "i", "c.md"])
    assert read_manifest(Path("i"))["finished"] is False
    assert run(["index", str(here), "--out", "i"]) == 0
    more = here / "more"
    more.mkdir()
    for name, content in (("1.md", "more words"), ("2.md", "words of b")):
        (more / name).write_text(content)
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(Letters, "embed_documents", interrupted)
        assert run(["add", "i", "more"]) == 130
    assert "; 4 texts are in i" in capsys.readouterr().err
    with pytest.raises(IndexFileError, match="repeat that command"):
        run(["add", "i", "c.md"])
    assert run(["add", "i", "more"]) == 0
    assert read_manifest(Path("i"))["finished"] is True
    assert len(texts("i")) == 5


def test_add_with_a_changed_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names a command that does it: `add` has no --yes."""
    (here / "a.md").write_text("words of a")
    (here / "b.md").write_text("words of b")
    assert run(["index", "a.md", "--out", "i"]) == 0
    before = Letters.embedded

    class Changed(Letters):
        def __init__(self, name: str | None = None, **options: Any) -> None:
            super().__init__(name, **options)
            self.identity = ModelIdentity("letters", "float32", "f" * 64)

    with monkeypatch.context() as patched:
        patched.setattr("rag_demo.embedding_model.EmbeddingModel", Changed)
        with pytest.raises(IndexFileError, match="rag-demo index SOURCE --out i --yes") as raised:
            run(["add", "i", "b.md"])
    assert "replace=True" not in str(raised.value)
    assert Letters.embedded == before
    assert texts("i") == ["words of a"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not(here: Path, value: str) -> None:
    """Found before anything is embedded; in a folder, such a line is passed over."""
    (here / "f").mkdir()
    (here / "f" / "c.jsonl").write_text(f'{{"text": "good"}}\n{{"text": "x", "v": [{value}]}}')
    with pytest.raises(RagDemoError, match=r"c\.jsonl:2: not JSON"):
        run(["index", "f/c.jsonl", "--out", "i"])
    assert not Path("i").exists()
    assert run(["index", "f", "--out", "i"]) == 0
    assert texts("i") == ["good"]
    with pytest.raises(RagDemoError, match="min-score"):
        run(["search", "i", "good", "--min-score", "nan"])
