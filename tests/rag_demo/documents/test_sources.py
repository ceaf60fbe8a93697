"""Unusual sources: code, and folders of any shape."""

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


def test_python_file_is_read_as_it_is(source: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Code without a docstring is not lost."""
    (source / "m.py").write_text('"""Return a thing."""\n\n\ndef f():\n    return secret_thing\n')
    assert "secret_thing" in read(source, tiny_model, tmp_path / "i")[0][1]


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
