"""The saved index: whole or refused, and never another program's folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError, ModelMismatchError
from rag_demo.index import MANIFEST, read_index, write_index
from rag_demo.storage.manifest import digest
from rag_demo.storage.writing import lock

VECTORS = np.eye(3, 5, dtype=np.float32)
DOCUMENTS = [
    Document("a", "one", {"n": 1}),
    Document("b", "two\nlines\u2028", {}),
    Document("c", "three \U0001f600", {"s": "\u00e9"}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_index(tmp_path / "index", "letters", VECTORS, DOCUMENTS)
    return tmp_path / "index"


def test_round_trip(folder: Path) -> None:
    """What was written comes back, line separators and characters beyond the BMP included."""
    back = read_index(folder, expected_model="letters")
    assert np.array_equal(back.vectors, VECTORS)
    assert list(back.documents) == DOCUMENTS


def test_saving_again_replaces(folder: Path) -> None:
    """A second save leaves exactly its own files; who has the first one open keeps it."""
    first = read_index(folder)
    write_index(folder, "letters", VECTORS[:1], [Document("z", "last", {})])
    assert [document.id for document in read_index(folder).documents] == ["z"]
    assert len(list(folder.iterdir())) == 5  # vectors, texts, checks, manifest, lock
    assert list(first.documents) == DOCUMENTS


def test_empty_index(tmp_path: Path) -> None:
    """An index of nothing is an index."""
    write_index(tmp_path / "i", "m", np.empty((0, 0), np.float32), [])
    assert len(read_index(tmp_path / "i").documents) == 0


def test_missing(tmp_path: Path) -> None:
    """A folder that is not there, or holds none, says how to make one."""
    with pytest.raises(IndexFileError, match="does not exist; make it again with"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(IndexFileError, match="holds no index"):
        read_index(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(IndexFileError, match="is no folder"):
        read_index(tmp_path / "file")


def test_other_model_names_both(folder: Path) -> None:
    """The error names the model of the index and the one that was going to be used."""
    with pytest.raises(ModelMismatchError, match="'letters', not with 'words'"):
        read_index(folder, expected_model="words")


@pytest.mark.parametrize("part", ["vectors", "texts", "checks"])
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
    with pytest.raises(IndexFileError, match=f"{path.name}' is damaged"):
        read_index(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "format version 99"),
        ({"format": "other"}, "is not a rag-demo index"),
        ({"count": "3"}, "of the wrong type"),
        ({"count": True}, "of the wrong type"),
        ({"count": -1}, "of the wrong type"),
        ({"count": 4}, "it does not hold 4 vectors|it is too small"),
        ({"count": 10**15}, "too small"),
        ({"files": None}, "does not name its vectors"),
        ({"files": {"vectors": {"name": "../../secret", "bytes": 1}}}, "does not name its vectors"),
    ],
)
def test_bad_manifest(folder: Path, change: dict[str, object], message: str) -> None:
    """A stranger's manifest, with a right checksum, cannot mislead or point elsewhere."""
    path = folder / MANIFEST
    manifest = {**json.loads(path.read_text()), **change}
    manifest.pop("sha256")
    path.write_text(json.dumps({**manifest, "sha256": digest(manifest)}))
    with pytest.raises(IndexFileError, match=message):
        read_index(folder)


def test_changed_manifest(folder: Path) -> None:
    """A manifest whose content does not fit its checksum."""
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"letters"', '"lettres"'))
    with pytest.raises(IndexFileError, match=r"manifest.json' is damaged \(its checksum is wrong"):
        read_index(folder)


def test_vectors_of_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that are no numbers, or not of length 1, are neither saved nor used."""
    write_index(tmp_path / "i", "letters", VECTORS, DOCUMENTS)
    for row in (np.full(5, np.nan), np.full(5, np.inf), np.zeros(5), np.full(5, 9.0)):
        vectors = VECTORS.copy()
        vectors[1] = row
        with pytest.raises(IndexFileError, match="the vector of row 1 is not of length 1"):
            write_index(tmp_path / "i", "letters", vectors, DOCUMENTS)
        assert np.array_equal(read_index(tmp_path / "i").vectors, VECTORS)
        with monkeypatch.context() as patched:
            patched.setattr("rag_demo.storage.saving.check_vectors", lambda vectors: None)
            write_index(tmp_path / "strangers", "letters", vectors, DOCUMENTS)
        with pytest.raises(IndexFileError, match="row 1 is not of length 1"):
            read_index(tmp_path / "strangers")


def test_large_index_is_checked_when_it_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening does not read it; what is used is checked, and what is damaged is not used."""
    monkeypatch.setattr("rag_demo.index._CHECKED_AT_ONCE_BYTES", 0)
    for module in ("checked_file", "mapped_file", "writing"):
        monkeypatch.setattr(f"rag_demo.storage.{module}.BLOCK_BYTES", 128)
    write_index(folder, "letters", VECTORS, DOCUMENTS)
    (texts,), (vectors,) = folder.glob("texts-*"), folder.glob("vectors-*")
    for path in (texts, vectors):
        content = bytearray(path.read_bytes())
        content[-2] ^= 4
        path.write_bytes(content)
    index = read_index(folder)
    assert index.documents[0] == DOCUMENTS[0]  # In a block that is whole.
    with pytest.raises(IndexFileError, match=f"{texts.name}' is damaged"):
        index.documents[2]
    with pytest.raises(IndexFileError, match=f"{vectors.name}' is damaged"):
        index.check_vectors()


def test_second_writer_is_refused(folder: Path) -> None:
    """Another process, or thread, that writes at the same time: one clear error, no harm."""
    with lock(folder), pytest.raises(IndexFileError, match="is being written by another process"):
        write_index(folder, "letters", VECTORS, DOCUMENTS)
    assert list(read_index(folder).documents) == DOCUMENTS
    write_index(folder, "letters", VECTORS, DOCUMENTS)


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
        write_index(tmp_path, "m", VECTORS, DOCUMENTS)
    with pytest.raises(IndexFileError, match="is a file"):
        write_index(tmp_path / "thesis.txt", "m", VECTORS, DOCUMENTS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_leftovers_of_a_killed_first_save(tmp_path: Path) -> None:
    """What a save leaves that was killed before there was an index is no obstacle, and goes."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in (".tmpA1b2C3", "vectors-0123abcd.safetensors", "manifest-0123abcd.tmp", "lock"):
        (folder / name).write_text("half")
    write_index(folder, "m", VECTORS, DOCUMENTS)
    assert len(list(folder.iterdir())) == 5
    assert list(read_index(folder).documents) == DOCUMENTS


def test_metadata_must_be_json(tmp_path: Path) -> None:
    """Nothing is written if the metadata cannot be."""
    bad = [Document("a", "b", {"x": object()})]
    with pytest.raises(IndexFileError, match="cannot be saved as JSON"):
        write_index(tmp_path / "index", "m", VECTORS[:1], bad)
    assert not (tmp_path / "index").exists()
