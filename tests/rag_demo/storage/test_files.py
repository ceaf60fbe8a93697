"""Hostile files: pipes, devices, links, cut off or replaced while they are open, full disks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import ROOT
from rag_demo import index as index_module
from rag_demo.documents.document import Document
from rag_demo.documents.rows import DocumentRows
from rag_demo.errors import IndexFileError, NewerIndexError, OtherIndexError
from rag_demo.index import read_index, write_index
from rag_demo.storage import writing
from rag_demo.storage.manifest import digest, read_manifest
from rag_demo.storage.writing import lock

VECTORS = np.eye(3, 5, dtype=np.float32)
DOCUMENTS = [Document(name, f"text of {name}", {}) for name in "abc"]
DERIVED = {"int8.codes": np.arange(20, dtype=np.int8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_index(tmp_path / "index", "m", VECTORS, DOCUMENTS, derived=DERIVED)
    return tmp_path / "index"


def make_socket(path: Path) -> None:
    # A name of a socket may have a hundred characters only.
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


IRREGULAR: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": make_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("what", IRREGULAR)
@pytest.mark.parametrize("part", ["manifest", "vectors", "texts", "checks", "derived"])
def test_no_file_in_place_of_a_file(folder: Path, part: str, what: str) -> None:
    """One error that names it; nothing hangs, and nothing is read without end."""
    (path,) = folder.glob(f"{part}*")
    path.unlink()
    IRREGULAR[what](path)
    missing = "holds no index" if part == "manifest" else "No such file"
    reason = missing if what == "dangling link" else "is no regular file"
    with pytest.raises(IndexFileError, match=f"({path.name}|{folder.name}).*{reason}"):
        read_index(folder)


@pytest.mark.parametrize("what", [name for name in IRREGULAR if "link" not in name])
def test_no_lock_in_place_of_the_lock(folder: Path, what: str) -> None:
    """Writing is refused, and the index stays."""
    (folder / "lock").unlink()
    IRREGULAR[what](folder / "lock")
    with pytest.raises(IndexFileError, match="lock"):
        write_index(folder, "m", VECTORS[:1], DOCUMENTS[:1])
    assert len(read_index(folder).documents) == 3


@pytest.mark.parametrize("link", ["symbolic", "hard", "dangling"])
def test_a_lock_that_is_a_link_cuts_nothing_off(folder: Path, link: str, tmp_path: Path) -> None:
    """What it leads to keeps every byte, and is not made where it is not there."""
    other = tmp_path / "thesis.txt"
    if link != "dangling":
        other.write_text("do not touch")
    (folder / "lock").unlink()
    if link == "hard":
        (folder / "lock").hardlink_to(other)
        write_index(folder, "m", VECTORS, DOCUMENTS)
    else:
        (folder / "lock").symlink_to(other)
        with pytest.raises(IndexFileError, match="cannot be locked"):
            write_index(folder, "m", VECTORS, DOCUMENTS)
    assert (other.read_text() if other.exists() else None) == (
        None if link == "dangling" else "do not touch"
    )


def test_all_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    """Whoever may read one may read all."""
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            write_index(tmp_path / str(mode), "m", VECTORS, DOCUMENTS, derived=DERIVED)
        finally:
            os.umask(before)
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / str(mode)).iterdir()}
        assert modes == {mode}


CUT_OFF = """
import sys
from pathlib import Path
import numpy as np
from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError
from rag_demo.index import read_index, write_index
from rag_demo.storage import mapped_file
mapped_file.COPIED_BYTES, asked = int(sys.argv[2]), sys.argv[3] == "asked"
folder = Path(sys.argv[1])
vectors = np.zeros((40_000, 8), np.float32)
vectors[:, 0] = 1
documents = (Document(str(n), "a text", {}) for n in range(len(vectors)))
write_index(folder, "m", vectors, documents, derived={"codes": np.ones(1 << 20, np.int8)})
index = read_index(folder)
for path in folder.iterdir():
    if path.name != "lock":
        path.write_bytes(b"")
for use in (index.check_lengths if asked else int, lambda: index.vectors.sum(),
            lambda: index.derived["codes"].sum(), lambda: index.documents[3]):
    try:
        use()
    except IndexFileError as error:
        print("cut off" if "cut off" in str(error) else error, flush=True)
"""


@pytest.mark.parametrize("asked", ["", "asked"])
def test_cut_off_while_open(tmp_path: Path, asked: str) -> None:
    """Vectors of a small index are a copy; texts are read, so that it is an error."""
    command = [sys.executable, "-c", CUT_OFF, str(tmp_path / "i"), str(1 << 24), asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "cut off\n"), done.stderr


@pytest.mark.parametrize("asked", ["", "asked"])
def test_a_large_one_cut_off_while_open(tmp_path: Path, asked: str) -> None:
    """Who asks is told. Who does not, as here after it, is killed: the control."""
    command = [sys.executable, "-c", CUT_OFF, str(tmp_path / "i"), "0", asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert done.stdout == ("cut off\n" if asked else "")


def test_opening_while_another_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose manifest names files that went meanwhile reads the manifest again."""
    saves = 0

    def saved_meanwhile(folder: Path, manifest: Any, what: str) -> tuple[Path, int]:
        nonlocal saves
        if what == "texts" and saves < 5:
            saves += 1
            write_index(folder, "m", VECTORS[:1], DOCUMENTS[:1])
        return entry_of(folder, manifest, what)

    entry_of = index_module.entry_of
    monkeypatch.setattr(index_module, "entry_of", saved_meanwhile)
    assert len(read_index(folder).documents) == 1
    assert saves == 5
    # The control: without a second look it is "damaged".
    saves = 0
    with pytest.raises(IndexFileError, match="damaged"):
        index_module._open(folder, read_manifest(folder))


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write or sync fails: one error, the index as it was, and no file left over."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = {"left": 0}

    def failing(function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args)

        return call

    monkeypatch.setattr(writing.BlockWriter, "write", failing(writing.BlockWriter.write))
    monkeypatch.setattr(writing.os, "fsync", failing(os.fsync))
    monkeypatch.setattr(writing.os, "pwrite", failing(os.pwrite))
    failed = 0
    while True:
        calls["left"] = failed + 1
        try:
            write_index(folder, "m", VECTORS[:1], DOCUMENTS[:1], derived=DERIVED)
        except IndexFileError as error:
            assert "No space left on device" in str(error)
        if calls["left"] > 0:
            break
        failed += 1
        now = {path.name: path.read_bytes() for path in folder.iterdir()}
        if len(read_index(folder).documents) == 3:
            assert {**now, "lock": b""} == {**files, "lock": b""}
    assert failed > 10
    assert len(read_index(folder).documents) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": VECTORS[:2]}, "2 vectors do not fit documents with 3 rows"),
        ({"documents": DOCUMENTS[:2]}, "2 documents do not fit rows of 3"),
        ({"rows": DocumentRows(2)}, "3 vectors do not fit documents with 2 rows"),
        ({"vectors": VECTORS[0]}, "must have the shape"),
        ({"documents": [*DOCUMENTS[:2], DOCUMENTS[0]]}, "the id 'a' stands twice"),
        ({"documents": [*DOCUMENTS[:2], Document("d", 7, {})]}, "is no string"),
        ({"documents": [*DOCUMENTS[:2], Document(7, "d", {})]}, "is no string"),
        ({"documents": [*DOCUMENTS[:2], Document("d", "d", {"x": {1}})]}, "as JSON"),
        ({"documents": [*DOCUMENTS[:2], Document("d", "d", None)]}, "as JSON"),
    ],
)
def test_what_does_not_fit_together(folder: Path, change: dict[str, Any], message: str) -> None:
    """Is refused, and the good index stays as it is."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    given = {"vectors": VECTORS, "documents": DOCUMENTS, "rows": DocumentRows(3), **change}
    with pytest.raises(IndexFileError, match=message):
        write_index(folder, "m", given["vectors"], given["documents"], given["rows"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def write_manifest(folder: Path, **changes: Any) -> None:
    import json

    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    manifest.pop("sha256")
    path.write_text(json.dumps({**manifest, "sha256": digest(manifest)}))


def test_a_newer_versions_index_is_not_replaced(folder: Path) -> None:
    """Unless that is asked for."""
    write_manifest(folder, version=99)
    with pytest.raises(NewerIndexError, match="format version 99"):
        read_index(folder)
    with pytest.raises(OtherIndexError, match="newer version"):
        write_index(folder, "m", VECTORS, DOCUMENTS)
    write_index(folder, "m", VECTORS, DOCUMENTS, replace=True)
    assert len(read_index(folder).documents) == 3


def test_another_programs_manifest_is_not_replaced(tmp_path: Path) -> None:
    """A folder with a manifest.json of something else, alone or among its files."""
    for others in ((), ("app.js",)):
        for content in ('{"name": "an app"}', "[]"):
            (tmp_path / "manifest.json").write_text(content)
            for name in others:
                (tmp_path / name).write_text("1")
            with pytest.raises(IndexFileError, match="another program"):
                write_index(tmp_path, "m", VECTORS, DOCUMENTS)
            assert (tmp_path / "manifest.json").read_text() == content


def test_an_index_of_the_version_before_opens(folder: Path) -> None:
    """It knows the model by name only, and has no derived arrays."""
    import json

    write_index(folder, "m", VECTORS, DOCUMENTS)
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("dtype", "fingerprint", "source", "finished"):
        del manifest[key]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_manifest(folder, version=3)
    index = read_index(folder, expected_model="m")
    assert dict(index.derived) == {}
    assert list(index.documents) == DOCUMENTS


def test_the_lock_is_held_by_one(folder: Path) -> None:
    """Also after one who was refused has gone."""
    with lock(folder):
        for _ in range(2):
            with pytest.raises(IndexFileError, match=f"another process .{os.getpid()}"):
                write_index(folder, "m", VECTORS, DOCUMENTS)
    write_index(folder, "m", VECTORS, DOCUMENTS)


@pytest.mark.parametrize("wrong", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_folder_that_was_made_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: BaseException
) -> None:
    """A first save that fails leaves no folder, and none above it; what was there stays."""

    def failing(*arguments: Any) -> None:
        raise wrong

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(writing.BlockWriter, "finish", failing)
    for name, left in (("a/b/c", False), ("there", True), ("there/d", False)):
        with pytest.raises((KeyboardInterrupt, IndexFileError)):
            write_index(tmp_path / name, "m", VECTORS, DOCUMENTS)
        assert (tmp_path / name).exists() is left
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_lock_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited with it open does not write beside the one that has made another."""
    opens = writing._open_lock

    def slowly(path: Path) -> int:
        descriptor = opens(path)
        path.unlink()
        return descriptor

    monkeypatch.setattr(writing, "_open_lock", slowly)
    with pytest.raises(IndexFileError, match="was removed by another process"):
        write_index(tmp_path / "i", "m", VECTORS, DOCUMENTS)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Said of the folder, which is what somebody named, with the way out."""

    def refuse(path: Path, *_: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr("rag_demo.storage.writing.os.open", refuse)
    with pytest.raises(IndexFileError) as error:
        write_index(folder, "m", VECTORS, DOCUMENTS)
    said = str(error.value)
    assert said.startswith(f"the index cannot be written to '{folder}': lock cannot be locked: ")
    assert said.endswith(f"{os.strerror(code)}; mend that, or name another folder")
