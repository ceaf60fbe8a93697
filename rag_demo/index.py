"""The saved index: a folder that is always the old one or the new one, never a mixture.

``manifest.json`` names the files that belong together, with their sizes and checksums. The
files of a save get names of their own; renaming the new manifest over the old one is the one
moment in which the index changes. Arrays are safetensors or bare, texts are JSON lines: nothing
here can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, Documents
from rag_demo.documents.rows import DocumentRows
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    AGAIN,
    NAME_MODEL,
    IndexFileError,
    ModelMismatchError,
    NewerIndexError,
    OtherIndexError,
    UnreadableIndexError,
    damaged,
)
from rag_demo.storage.checked_file import ReadFile, open_regular, read_at
from rag_demo.storage.derived import DerivedArrays
from rag_demo.storage.document_file import DocumentFile
from rag_demo.storage.manifest import (
    MANIFEST,
    VERSION,
    entry_of,
    read_manifest,
    refuse_foreign_folder,
)
from rag_demo.storage.mapped_file import MappedFile
from rag_demo.storage.saving import check_vectors, save_files
from rag_demo.storage.writing import made_and_locked

__all__ = [
    "MANIFEST",
    "VERSION",
    "SavedIndex",
    "identity_of",
    "read_index",
    "read_manifest",
    "refuse_foreign_folder",
    "refuse_model",
    "refuse_other_index",
    "replace_index",
    "write_index",
]

_CHECKED_AT_ONCE_BYTES = 1 << 26  # takes 30 ms
_TRIES = 100


@dataclass(frozen=True)
class SavedIndex:
    """What an index folder holds.

    Attributes:
        model: The embedding model that made the vectors, by name.
        vectors: Shape (n, d), float32, each of length 1. Of an index that was read they are
            mapped or copied, not to be changed, and not checked yet: see `check_vectors`.
        documents: What the index is of.
        rows: Which rows belong to each of them.
        file: Where the vectors come from, if the index was read.
        derived: What was computed from them and kept, by name; each is checked as it is read.
        identity: All that is known of the model.
    """

    model: str
    vectors: npt.NDArray[np.float32]
    documents: Documents
    rows: DocumentRows
    file: MappedFile | None = None
    derived: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    identity: ModelIdentity = field(default_factory=lambda: ModelIdentity(""))

    def check_vectors(self) -> None:
        """Compare the vectors with their checksums, which takes a second for two gigabytes.

        Raises:
            IndexFileError: They are not what was written, or none of length 1.
        """
        if self.file is None:
            return
        self.file.check_all()
        passed = None if self.file.resident else self.file.drop
        bad = check_vectors(self.vectors, passed)
        if bad is not None:
            raise damaged(self.file.path, bad)

    def check_all(self) -> int:
        """Compare everything with its checksums, and read every document; return their count.

        Raises:
            IndexFileError: Something is not what was written.
        """
        self.check_vectors()
        if isinstance(self.derived, DerivedArrays):
            self.derived.check_all()
        return sum(1 for _ in self.documents.stream())

    def check_lengths(self) -> None:
        """See that no mapped file was cut off since it was opened; takes microseconds.

        Reading what is not there any more would end the process.

        Raises:
            IndexFileError: One was.
        """
        for file in (self.file, self.derived):
            if isinstance(file, (MappedFile, DerivedArrays)):
                file.check_length()


def write_index(
    folder: Path,
    model: str | ModelIdentity,
    vectors: npt.NDArray[np.float32],
    documents: Iterable[Document],
    rows: DocumentRows | None = None,
    *,
    derived: Mapping[str, npt.NDArray[Any]] | None = None,
    replace: bool = False,
) -> None:
    """Write an index, replacing the one in the folder once everything is on the disk.

    Args:
        folder: Where to.
        model: The embedding model that made the vectors; a name alone is one without files.
        vectors: Shape (n, d), each of length 1.
        documents: What the index is of; ids differ.
        rows: Which rows belong to each of them; None where each has one.
        derived: What was computed from them and is kept: arrays of numbers by name.
        replace: Replace the index of a newer version too.

    Raises:
        NewerIndexError: The folder holds an index of a newer version.
        IndexFileError: The folder holds something else, is being written by another process, or
            cannot be written; or what was given does not fit together, or is not JSON. The
            index that is there stays as it is.
    """
    refuse_foreign_folder(folder)
    with made_and_locked(folder):
        if not replace:
            _refuse_newer(folder)
        identity = model if isinstance(model, ModelIdentity) else ModelIdentity(model)
        replace_index(folder, identity, vectors, documents, rows, derived or {})


def replace_index(
    folder: Path,
    model: ModelIdentity,
    vectors: npt.NDArray[np.float32],
    documents: Iterable[Document],
    rows: DocumentRows | None = None,
    derived: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    source: str | None = None,
    finished: bool = True,
) -> None:
    """Do what `write_index` does, for who holds the folder's `lock` already.

    Args:
        source: What was ingested, as `rag_demo.ingest.ingest` was told.
        finished: Whether all of it was.
    """
    described = {
        "model": model.name,
        "dtype": model.dtype,
        "fingerprint": model.fingerprint,
        "source": source,
        "finished": finished,
    }
    save_files(
        folder, described, vectors, documents, rows or DocumentRows(len(vectors)), derived or {}
    )


def read_index(folder: Path, *, expected_model: str | ModelIdentity | None = None) -> SavedIndex:
    """Open an index: its files are mapped, and checked as they are used.

    Takes milliseconds, whatever its size; one of less than 64 MB is checked at once. An index
    that is replaced meanwhile stays whole for who has it open.

    Args:
        folder: Where it is.
        expected_model: The embedding model that will be asked; None accepts any.

    Raises:
        IndexFileError: A file is missing, damaged, of another kind, or from a newer version.
        ModelMismatchError: Another model made it.
    """
    manifest = read_manifest(folder)
    for _ in range(_TRIES):
        if expected_model is not None:
            refuse_model(folder, manifest, expected_model)
        try:
            return _open(folder, manifest)
        except IndexFileError:
            # Another process may have saved, and removed what this manifest names.
            before, manifest = manifest, read_manifest(folder)
            if manifest == before:
                raise
    raise IndexFileError(f"'{folder}' is saved again and again; try again when that has ended")


def refuse_other_index(
    folder: Path, *, model: ModelIdentity | None = None, source: str | None = None
) -> None:
    """Refuse to replace an index unasked that is not an earlier one of the same.

    A damaged one may be replaced: nobody can use it. One that cannot be read may be whole.

    Args:
        folder: Of the index; there may be none.
        model: The embedding model that is going to make vectors; None to ask about this later.
        source: What is going to be ingested.

    Raises:
        OtherIndexError: It is of a newer version, another source or another model.
        UnreadableIndexError: Nobody can say.
    """
    try:
        _refuse_newer(folder)
        manifest = read_manifest(folder)
    except (OtherIndexError, UnreadableIndexError):
        raise
    except IndexFileError:
        return
    identity = identity_of(manifest)
    if manifest.get("source") != source:
        of = manifest.get("source")
        what = f"the index of {of}" if of else "an index that a program or an earlier version made"
        raise _other(folder, f"{what}, not of {source or 'what a program hands over'}")
    if model is not None and not identity.is_same(model):
        raise _other(folder, f"vectors of the model {identity}, not of {model}")


def identity_of(manifest: Mapping[str, Any]) -> ModelIdentity:
    """Return what a manifest says about the model."""
    return ModelIdentity(manifest["model"], manifest.get("dtype"), manifest.get("fingerprint"))


def _other(folder: Path, what: str) -> OtherIndexError:
    return OtherIndexError(
        f"'{folder}' holds {what}; name another folder, or replace it: --yes, or replace=True"
    )


def _refuse_newer(folder: Path) -> None:
    try:
        read_manifest(folder)
    except NewerIndexError:
        raise _other(folder, "the index of a newer version of rag-demo") from None
    except UnreadableIndexError:
        raise
    except IndexFileError:
        return


def refuse_model(folder: Path, manifest: Mapping[str, Any], expected: str | ModelIdentity) -> None:
    """Refuse an index that another model made.

    Raises:
        ModelMismatchError: It was.
    """
    wanted = expected if isinstance(expected, ModelIdentity) else ModelIdentity(expected)
    made_by = identity_of(manifest)
    if manifest["version"] == 3:  # All that it knows is a name, or a path as it was given.
        if manifest["model"] == wanted.name or _is_same_folder(manifest["model"], wanted.name):
            return
    elif made_by.is_same(wanted):
        return
    raise ModelMismatchError(
        f"the index in '{folder}' was made with the model {made_by}, "
        f"not with {wanted}; name that one: {NAME_MODEL}; or {AGAIN} {folder} --yes"
    )


def _is_same_folder(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def _open(folder: Path, manifest: dict[str, Any]) -> SavedIndex:
    entries = {what: entry_of(folder, manifest, what) for what in ("vectors", "texts", "checks")}
    checks = _read_checks(*entries["checks"], manifest)
    file = MappedFile(*entries["vectors"], checks["vectors"])
    vectors = _find_vectors(file, manifest)
    texts = DocumentFile(ReadFile(*entries["texts"], checks["texts"]), checks["offsets"])
    try:
        rows = DocumentRows(len(texts), checks.get("counts"), checks.get("spans"))
    except ValueError as error:
        raise damaged(entries["checks"][0], error) from None
    if len(rows) != len(vectors):
        raise damaged(entries["texts"][0], f"it is for {len(rows)} vectors, not {len(vectors)}")
    derived = DerivedArrays(None, {})
    if "derived" in manifest["files"]:
        path, nbytes = entry_of(folder, manifest, "derived")
        if "derived" not in checks:
            raise damaged(path, "it has no checksums")
        derived = DerivedArrays(
            MappedFile(path, nbytes, checks["derived"]), manifest.get("derived")
        )
    index = SavedIndex(
        manifest["model"], vectors, Documents(texts), rows, file, derived, identity_of(manifest)
    )
    if len(file) + entries["texts"][1] <= _CHECKED_AT_ONCE_BYTES:
        texts.check_all()
        index.check_vectors()
    return index


def _read_checks(path: Path, nbytes: int, manifest: dict[str, Any]) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        with open_regular(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != nbytes:
                raise damaged(path, f"it has {size} bytes, not {nbytes}")
            content = bytearray(size)
            read_at(descriptor, content)
        if hashlib.sha256(content).hexdigest() != manifest.get("checks_sha256"):
            raise damaged(path, "its checksum is wrong")
        checks = load(bytes(content))
        kinds = {"vectors": ("uint32", 1), "texts": ("uint32", 1), "offsets": ("uint64", 1)}
        if "derived" in checks:
            kinds["derived"] = ("uint32", 1)
        if "counts" in checks or "spans" in checks:
            kinds |= {"counts": ("int64", 1), "spans": ("int64", 2)}
        found = {name: (checks[name].dtype.name, checks[name].ndim) for name in kinds}
        if found != kinds:
            raise damaged(path, "its arrays are of other types")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise damaged(path, error) from None
    return dict(checks)


def _find_vectors(file: MappedFile, manifest: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Find the array in a safetensors file: 8 bytes of length, a header of JSON, the data."""
    shape = (manifest["count"], manifest["dimension"])
    nbytes = 4 * shape[0] * shape[1]
    start = len(file) - nbytes
    if start < 8 or start % 4:
        raise damaged(file.path, f"it is too small for {shape[0]} vectors of {shape[1]}")
    try:
        length = int.from_bytes(file.read(0, 8), "little")
        header = json.loads(bytes(file.read(8, start)))["vectors"] if length == start - 8 else {}
        fits = header == {"dtype": "F32", "shape": list(shape), "data_offsets": [0, nbytes]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(file.path, error) from None
    if not fits:
        raise damaged(file.path, f"it does not hold {shape[0]} vectors of {shape[1]}")
    return np.frombuffer(file.unchecked, np.float32, shape[0] * shape[1], start).reshape(shape)
