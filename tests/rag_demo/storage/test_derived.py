"""Derived arrays: kept beside the index, mapped, checked as they are read, and never needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError
from rag_demo.index import read_index, write_index

VECTORS = np.eye(3, 5, dtype=np.float32)
DOCUMENTS = [Document(name, f"text of {name}", {}) for name in "abc"]
DERIVED = {
    "int8.codes": np.arange(-60, 60, dtype=np.int8).reshape(24, 5),
    "int8.scales": np.linspace(0, 1, 7, dtype=np.float32),
    "bm25.indptr": np.arange(4, dtype=np.int64),
    "flags": np.array([True, False]),
    "none": np.empty((0, 3), np.float64),
    "one": np.array(7, np.uint16),
    "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
}


def save(folder: Path, derived: dict[str, np.ndarray] = DERIVED) -> Path:
    write_index(folder, "m", VECTORS, DOCUMENTS, derived=derived)
    return folder


@pytest.mark.parametrize("copied_bytes", [1 << 24, 0])
def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied_bytes: int) -> None:
    """Copied or mapped: values, shapes and types come back, each aligned for what computes."""
    monkeypatch.setattr("rag_demo.storage.mapped_file.COPIED_BYTES", copied_bytes)
    back = read_index(save(tmp_path / "i")).derived
    assert set(back) == set(DERIVED)
    for name, array in DERIVED.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert np.array_equal(back[name], array)
    with pytest.raises(KeyError):
        back["int8.sums"]


def test_what_is_written_to_an_array_stays_there(tmp_path: Path) -> None:
    """Neither the file nor another reader sees it."""
    folder = save(tmp_path / "i")
    first = read_index(folder)
    first.derived["int8.codes"][:] = 9
    second = read_index(folder).derived["int8.codes"]
    assert np.array_equal(second, DERIVED["int8.codes"])


def test_damage_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array in a damaged block is refused by the file's name; others, and answers, are not."""
    for module in ("checked_file", "mapped_file", "writing"):
        monkeypatch.setattr(f"rag_demo.storage.{module}.BLOCK_BYTES", 128)
    folder = save(tmp_path / "i", {"a": np.zeros(128, np.int8), "b": np.ones(128, np.int8)})
    (path,) = folder.glob("derived-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    index = read_index(folder)
    assert not index.derived["a"].any()
    for _ in range(2):
        with pytest.raises(IndexFileError, match=f"{path.name}' is damaged"):
            index.derived["b"]
    assert list(index.documents) == DOCUMENTS


@pytest.mark.parametrize("damage", ["remove", "truncate", "folder"])
def test_a_missing_file_is_named(tmp_path: Path, damage: str) -> None:
    """An index that names a file which is not there is no whole one."""
    folder = save(tmp_path / "i")
    (path,) = folder.glob("derived-*")
    content = path.read_bytes()
    path.unlink()
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(IndexFileError, match=f"{path.name}' is damaged"):
        read_index(folder)


def test_none(tmp_path: Path) -> None:
    """An index without any has an empty mapping, and no file for them."""
    folder = save(tmp_path / "i", {})
    assert dict(read_index(folder).derived) == {}
    assert len(list(folder.iterdir())) == 5


def test_they_go_with_their_index(tmp_path: Path) -> None:
    """Saving without them leaves no file of them; who has them open keeps them."""
    first = read_index(save(tmp_path / "i"))
    save(tmp_path / "i", {})
    assert not list((tmp_path / "i").glob("derived-*"))
    assert np.array_equal(first.derived["turned"], DERIVED["turned"])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("../up", np.zeros(1), "is no name"),
        ("", np.zeros(1), "is no name"),
        ("objects", np.array([None]), "is of object"),
        ("texts", np.array(["a"]), "is of <U1"),
        ("list", [1, 2], "is of list"),
    ],
)
def test_what_cannot_be_kept(tmp_path: Path, name: str, array: np.ndarray, message: str) -> None:
    """Refused before anything changes."""
    save(tmp_path / "i")
    with pytest.raises(IndexFileError, match=message):
        save(tmp_path / "i", {name: array})
    assert set(read_index(tmp_path / "i").derived) == set(DERIVED)
    assert len(list((tmp_path / "i").iterdir())) == 6
