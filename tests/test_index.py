"""The saved index: whole or refused, and never another program's folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rag_demo.errors import IndexFileError, ModelMismatchError
from rag_demo.index import MANIFEST, SavedIndex, read_index, write_index

INDEX = SavedIndex(
    model="letters",
    vectors=np.eye(3, 5, dtype=np.float32),
    ids=["a", "b", "c"],
    texts=["one", "two\nlines\u2028", "three \U0001f600"],
    metadata=[{"n": 1}, {}, {"s": "\u00e9"}],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_index(tmp_path / "index", INDEX)
    return tmp_path / "index"


def test_round_trip(folder: Path) -> None:
    """What was written comes back, line separators and characters beyond the BMP included."""
    back = read_index(folder, expected_model="letters")
    assert np.array_equal(back.vectors, INDEX.vectors)
    assert (back.ids, back.texts, back.metadata) == (INDEX.ids, INDEX.texts, INDEX.metadata)


def test_saving_again_replaces(folder: Path) -> None:
    """A second save leaves exactly its own three files."""
    write_index(folder, SavedIndex("letters", INDEX.vectors[:1], ["z"], ["last"], [{}]))
    assert read_index(folder).ids == ["z"]
    assert len(list(folder.iterdir())) == 3


def test_empty_index(tmp_path: Path) -> None:
    """An index of nothing is an index."""
    write_index(tmp_path / "i", SavedIndex("m", np.empty((0, 0), np.float32), [], [], []))
    assert read_index(tmp_path / "i").ids == []


def test_missing(tmp_path: Path) -> None:
    """A folder that is not there, or holds none, says how to make one."""
    with pytest.raises(IndexFileError, match="does not exist; make it again with"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(IndexFileError, match="holds no index"):
        read_index(tmp_path)


def test_other_model_names_both(folder: Path) -> None:
    """The error names the model of the index and the one that was going to be used."""
    with pytest.raises(ModelMismatchError, match="'letters', not with 'words'"):
        read_index(folder, expected_model="words")


@pytest.mark.parametrize("part", ["vectors", "texts"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damage_is_named(folder: Path, part: str, damage: str) -> None:
    """One wrong bit, a short file or none: the error names the file."""
    (path,) = folder.glob(f"{part}-*")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-3])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"")
    with pytest.raises(IndexFileError, match=f"{path.name} is damaged"):
        read_index(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "format version 99"),
        ({"format": "other"}, "is not a rag-demo index"),
        ({"count": "3"}, "of the wrong type"),
        ({"count": 4}, "its vectors are"),
        ({"files": None}, "does not name its vectors"),
        ({"files": {"vectors": {"name": "../../secret"}}}, "does not name its vectors"),
    ],
)
def test_bad_manifest(folder: Path, change: dict[str, object], message: str) -> None:
    """A manifest from elsewhere is refused, and cannot point outside of its folder."""
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(IndexFileError, match=message):
        read_index(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_manifest_that_is_no_json(folder: Path, content: str) -> None:
    """Garbage instead of a manifest is one error."""
    (folder / MANIFEST).write_text(content)
    with pytest.raises(IndexFileError):
        read_index(folder)


def test_foreign_folder_is_not_written_to(tmp_path: Path) -> None:
    """A folder with other files, and a file, are refused and stay as they are."""
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(IndexFileError, match="holds other files"):
        write_index(tmp_path, INDEX)
    with pytest.raises(IndexFileError, match="is a file"):
        write_index(tmp_path / "thesis.txt", INDEX)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_metadata_must_be_json(tmp_path: Path) -> None:
    """Nothing is written if the metadata cannot be."""
    bad = SavedIndex("m", INDEX.vectors[:1], ["a"], ["b"], [{"x": object()}])
    with pytest.raises(IndexFileError, match="cannot be saved as JSON"):
        write_index(tmp_path / "index", bad)
    assert not (tmp_path / "index").exists()
