"""Folders of any size and shape."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from rag_demo.documents.files import files_of
from rag_demo.documents.skipped import Skipped


def listed(folder: Path) -> list[str]:
    return [file.name for file in files_of(folder, Skipped())]


def test_in_the_order_of_the_names(tmp_path: Path) -> None:
    """A folder's files stand where its name does; loops of links are not followed."""
    for name in ("b/2/x", "b/1", "a", "c/d/e/f", "c/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("b/up", "c/d/loop"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    assert listed(tmp_path) == ["a", "b/1", "b/2/x", "c/a", "c/d/e/f"]


def test_memory_is_that_of_the_names(tmp_path: Path) -> None:
    """Some eighty bytes a file while a folder is passed; a list of paths takes five times that."""
    count = 4000
    for number in range(count):
        (tmp_path / f"{number:06}.md").touch()
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(3):  # Python's dictionary of all names grows by megabytes at a time.
            tracemalloc.reset_peak()
            found = sum(1 for _ in files_of(tmp_path, Skipped()))
            peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
        paths = [(path, path.name, str(path)) for path in tmp_path.iterdir()]
        control = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == len(paths) == count
    assert min(peaks) < 200 * count < control


def test_a_deep_folder(tmp_path: Path) -> None:
    """Deeper than a path may be long: what cannot be reached is said, and the rest is read."""
    here = os.open(tmp_path, os.O_RDONLY)
    descriptors = [here]
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=descriptors[-1])
        descriptors.append(os.open("d" * 200, os.O_RDONLY, dir_fd=descriptors[-1]))
    for descriptor in descriptors:
        os.close(os.open("file.md", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    skipped = Skipped()
    found = list(files_of(tmp_path, skipped))
    for depth, descriptor in reversed(list(enumerate(descriptors))):
        os.unlink("file.md", dir_fd=descriptor)
        if depth:
            os.rmdir("d" * 200, dir_fd=descriptors[depth - 1])
        os.close(descriptor)
    assert 10 < len(found) < 30
    assert "File name too long" in str(skipped)
