"""Unusual sources: docstrings, and folders of any shape."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.rag_command import documents, rag_demo, succeed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def read(source: Path | str, tiny_model: Path, out: Path) -> list[tuple[str, str]]:
    """Index a source; return the place and the text of each document."""
    succeed("index", source, "--out", out, "--model", tiny_model, "--no-cache", "--yes")
    return [(each["metadata"]["source"], each["text"]) for each in documents(out).values()]


@pytest.mark.slow
@pytest.mark.parametrize("piece", [":", ":a", ":a:`", "f(", ") ->", ":a:`<", "`", "<", ">"])
def test_long_docstring_takes_linear_time(
    source: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    monkeypatch.syspath_prepend(source)
    (source / "long_docstring.py").write_text(f'"""Some words {piece * 180_000}"""\n')
    assert read("long_docstring", tiny_model, tmp_path / "i")


def test_package_docstrings_are_read_without_markup(
    source: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place is that of the definition."""
    monkeypatch.syspath_prepend(source)
    text = "See :class:`~torch.Tensor`, :py:func:`add <torch.add>` and ``None``."
    (source / "marked_up.py").write_text(f'1 / 0\n\n\ndef f():\n    """{text}\n\n    More."""\n')
    ((place, found),) = read("marked_up", tiny_model, tmp_path / "i")
    assert place.endswith(":4")
    assert found.endswith("See torch.Tensor, add and `None`.")
    ((place, found),) = read(source, tiny_model, tmp_path / "i")  # Of a folder: all of it.
    assert place == "marked_up.py:4"
    assert found.endswith("More.")


@pytest.mark.parametrize("depth", [50, 2000, 100_000])
def test_registered_docstring_may_have_any_expression_as_name(
    source: Path, tiny_model: Path, tmp_path: Path, depth: int
) -> None:
    """A file that does not parse is plain text."""
    (source / "m.py").write_text(f'"""The module."""\nadd_docstr(a{".b" * depth}, "Documented.")')
    assert any("module." in text for _, text in read(source, tiny_model, tmp_path / "i"))


@pytest.mark.slow
def test_generated_source_is_read_as_plain_text(
    source: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Parsing would take hundreds of bytes for each character."""
    (source / "m.py").write_text('"""Return a thing."""\n' + "x = 1\n" * 200_000)
    assert len(read(source, tiny_model, tmp_path / "i")) > 1000
    (source / "m.py").write_text('"""Return a thing."""\n' + "x = 1\n" * 200)
    assert [text for _, text in read(source, tiny_model, tmp_path / "i")] == ["m: Return a thing."]


def test_folders_are_read_without_following_links(
    source: Path, tiny_model: Path, tmp_path: Path
) -> None:
    names = ["a.md", "b/1.md", "b/2/x.md", "c/a.md", "c/d/e/f.md"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"text of {name}")
    for name in ("b/up", "c/d/loop"):
        (source / name).symlink_to(source)
    (source / "self").symlink_to("self")
    assert {
        place.partition(":")[0] for place, _ in read(source, tiny_model, tmp_path / "i")
    } == set(names)


def test_folder_beyond_the_longest_path_is_skipped(source: Path, tiny_model: Path) -> None:
    """The rest is read."""
    descriptors = [os.open(source, os.O_RDONLY)]
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=descriptors[-1])
        descriptors.append(os.open("d" * 200, os.O_RDONLY, dir_fd=descriptors[-1]))
    for depth, descriptor in enumerate(descriptors):
        file = os.open("file.md", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor)
        os.write(file, f"text {depth}".encode())
        os.close(file)
    out = source.parent / "index"
    result = rag_demo("index", source, "--out", out, "--model", tiny_model)
    for depth, descriptor in reversed(list(enumerate(descriptors))):
        os.unlink("file.md", dir_fd=descriptor)
        if depth:
            os.rmdir("d" * 200, dir_fd=descriptors[depth - 1])
        os.close(descriptor)
    assert result.returncode == 0, str(result)
    assert "File name too long" in result.stderr
    assert 10 < len(documents(out)) < 30
