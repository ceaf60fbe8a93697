"""The saved index: a folder that is always the old one or the new one, never a mixture.

``manifest.json`` names the files that belong together, with their sizes and checksums. The
files of a save get names of their own; renaming the new manifest over the old one is the one
moment in which the index changes. Arrays are safetensors, texts are JSON lines: nothing here
can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, Documents, dump_document
from rag_demo.documents.rows import DocumentRows
from rag_demo.errors import AGAIN, IndexFileError, ModelMismatchError, damaged
from rag_demo.storage.document_file import DocumentFile
from rag_demo.storage.mapped_file import MappedFile, checksums
from rag_demo.storage.writing import LOCK, lock, sync

__all__ = ["SavedIndex", "read_index", "read_manifest", "write_index"]

FORMAT = "rag-demo index"
VERSION = 3
MANIFEST = "manifest.json"
SPOOL = "texts-spool-"  # a folder of an ingestion under way
_MOST_MANIFEST_BYTES = 1 << 20
_CHECKED_ROWS = 1 << 13
_CHECKED_AT_ONCE_BYTES = 1 << 26  # takes 30 ms


@dataclass(frozen=True)
class SavedIndex:
    """What an index folder holds.

    Attributes:
        model: The embedding model that made the vectors.
        vectors: Shape (n, d), float32, each of length 1. Of an index that was read they are
            mapped, read-only, and not checked yet: see `check_vectors`.
        documents: What the index is of.
        rows: Which rows belong to each of them.
        file: Where the vectors come from, if the index was read.
    """

    model: str
    vectors: npt.NDArray[np.float32]
    documents: Documents
    rows: DocumentRows
    file: MappedFile | None = None

    def check_vectors(self) -> None:
        """Compare the vectors with their checksums, which takes a second for two gigabytes.

        Raises:
            IndexFileError: They are not what was written, or none of length 1.
        """
        if self.file is None:
            return
        self.file.check_all()
        for start in range(0, len(self.vectors), _CHECKED_ROWS):
            some = self.vectors[start : start + _CHECKED_ROWS]
            lengths = np.einsum("ij,ij->i", some, some)
            if not (np.abs(lengths - 1) < 1e-3).all():  # Also where one is not a number.
                raise damaged(self.file.path, "a vector is not of length 1")
            if not self.file.resident:
                self.file.drop()


def write_index(
    folder: Path,
    model: str,
    vectors: npt.NDArray[np.float32],
    documents: Iterable[Document],
    rows: DocumentRows | None = None,
) -> None:
    """Write an index, replacing the one in the folder once everything is on the disk.

    Args:
        folder: Where to.
        model: The embedding model that made the vectors.
        vectors: Shape (n, d), each of length 1.
        documents: What the index is of.
        rows: Which rows belong to each of them; None where each has one.

    Raises:
        IndexFileError: The folder holds something else, is being written by another process,
            cannot be written, or the metadata are not JSON.
    """
    refuse_foreign_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IndexFileError(f"the index cannot be written to {folder}: {error}") from error
    with lock(folder):
        replace_index(folder, model, vectors, documents, rows or DocumentRows(len(vectors)))


def replace_index(
    folder: Path,
    model: str,
    vectors: npt.NDArray[np.float32],
    documents: Iterable[Document],
    rows: DocumentRows,
) -> None:
    """Do what `write_index` does, for who holds the folder's `lock` already."""
    from safetensors.numpy import save_file

    save_id = uuid.uuid4().hex[:12]
    paths = {
        name: folder / f"{name}-{save_id}.{kind}"
        for name, kind in (
            ("vectors", "safetensors"),
            ("texts", "jsonl"),
            ("checks", "safetensors"),
        )
    }
    try:
        save_file({"vectors": np.ascontiguousarray(vectors)}, paths["vectors"])
        offsets = _write_documents(paths["texts"], documents)
        checks = {name: checksums(paths[name]) for name in ("vectors", "texts")}
        save_file({**checks, "offsets": offsets, **_arrays(rows)}, paths["checks"])
        for path in paths.values():
            sync(path)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "count": len(vectors),
            "dimension": int(vectors.shape[1]),
            "files": {name: _describe(path) for name, path in paths.items()},
            "checks_sha256": hashlib.sha256(paths["checks"].read_bytes()).hexdigest(),
        }
        _replace_manifest(folder, manifest, save_id)
        _remove_others(folder, keep={*(p.name for p in paths.values()), MANIFEST, LOCK})
    except OSError as error:
        raise IndexFileError(f"the index cannot be written to {folder}: {error}") from error
    except (TypeError, ValueError) as error:
        raise IndexFileError(f"the metadata cannot be saved as JSON: {error}") from None
    finally:
        _remove_unfinished(folder, save_id)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check what describes an index.

    Raises:
        IndexFileError: It is missing, damaged, of another kind, or from a newer version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "holds no index" if folder.is_dir() else "does not exist"
        raise IndexFileError(f"{folder} {what}; {AGAIN} {folder}")
    try:
        if path.stat().st_size > _MOST_MANIFEST_BYTES:
            raise ValueError("it is far too large")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFileError(f"{path} is not a rag-demo index; {AGAIN} another folder")
    if manifest.get("version") != VERSION:
        raise IndexFileError(
            f"{path} has format version {manifest.get('version')!r}, this rag-demo reads "
            f"{VERSION}; upgrade it, or {AGAIN} {folder}"
        )
    if manifest.pop("sha256", None) != _digest(manifest):
        raise damaged(path, "its checksum is wrong")
    model, count, dimension = (manifest.get(key) for key in ("model", "count", "dimension"))
    numbers = all(type(n) is int and n >= 0 for n in (count, dimension))
    if not (isinstance(model, str) and numbers):
        raise damaged(path, "an entry is missing or of the wrong type")
    return manifest


def read_index(folder: Path, *, expected_model: str | None = None) -> SavedIndex:
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
    if expected_model is not None and manifest["model"] != expected_model:
        raise ModelMismatchError(
            f"the index in {folder} was made with the model {manifest['model']!r}, "
            f"not with {expected_model!r}; use that model, or {AGAIN} {folder}"
        )
    entries = {what: _entry(folder, manifest, what) for what in ("vectors", "texts", "checks")}
    checks = _read_checks(*entries["checks"], manifest)
    file = MappedFile(*entries["vectors"], checks["vectors"])
    vectors = _map_vectors(file, manifest)
    texts = DocumentFile(MappedFile(*entries["texts"], checks["texts"]), checks["offsets"])
    try:
        rows = DocumentRows(len(texts), checks.get("counts"), checks.get("spans"))
    except ValueError as error:
        raise damaged(entries["checks"][0], error) from None
    if len(rows) != len(vectors):
        raise damaged(entries["texts"][0], f"it is for {len(rows)} vectors, not {len(vectors)}")
    index = SavedIndex(manifest["model"], vectors, Documents(texts), rows, file)
    if len(file) + entries["texts"][1] <= _CHECKED_AT_ONCE_BYTES:
        texts.check_all()
        index.check_vectors()
    return index


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse to write among files that are not an index.

    Raises:
        IndexFileError: The folder is a file, or holds other things.
    """
    if folder.exists() and not folder.is_dir():
        raise IndexFileError(f"{folder} is a file; name a folder for the index")
    if folder.is_dir() and not (folder / MANIFEST).exists():
        others = [entry.name for entry in folder.iterdir() if not _is_ours(entry.name)]
        if others:
            raise IndexFileError(
                f"{folder} holds other files ({others[0]}); name a new or empty folder"
            )


def _write_documents(path: Path, documents: Iterable[Document]) -> npt.NDArray[np.uint64]:
    """Write one line for each; return where each begins, and where the last one ends."""
    offsets = [0]
    with path.open("wb") as file:
        for document in documents:
            offsets.append(offsets[-1] + file.write(dump_document(document)))
    return np.asarray(offsets, np.uint64)


def _arrays(rows: DocumentRows) -> dict[str, npt.NDArray[np.int64]]:
    if rows.counts is None or rows.spans is None:
        return {}
    return {"counts": rows.counts, "spans": rows.spans}


def _entry(folder: Path, manifest: dict[str, Any], what: str) -> tuple[Path, int]:
    """Return where a file of the index is, and how many bytes it has to have."""
    files = manifest.get("files")
    entry = files.get(what) if isinstance(files, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    nbytes = entry.get("bytes") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not _is_ours(name) or type(nbytes) is not int:
        raise damaged(folder / MANIFEST, f"it does not name its {what}")
    return folder / name, nbytes


def _read_checks(path: Path, nbytes: int, manifest: dict[str, Any]) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        if path.stat().st_size != nbytes:
            raise damaged(path, f"it has {path.stat().st_size} bytes, not {nbytes}")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest.get("checks_sha256"):
            raise damaged(path, "its checksum is wrong")
        checks = load(content)
        kinds = {"vectors": ("uint32", 1), "texts": ("uint32", 1), "offsets": ("uint64", 1)}
        if "counts" in checks or "spans" in checks:
            kinds |= {"counts": ("int64", 1), "spans": ("int64", 2)}
        found = {name: (checks[name].dtype.name, checks[name].ndim) for name in kinds}
        if found != kinds:
            raise damaged(path, "its arrays are of other types")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise damaged(path, error) from None
    return dict(checks)


def _map_vectors(file: MappedFile, manifest: dict[str, Any]) -> npt.NDArray[np.float32]:
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


def _describe(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size}


def _digest(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _replace_manifest(folder: Path, manifest: dict[str, Any], save_id: str) -> None:
    new = folder / f"manifest-{save_id}.tmp"
    described = {**manifest, "sha256": _digest(manifest)}
    new.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    sync(new)
    new.replace(folder / MANIFEST)
    sync(folder)


_OURS = re.compile(
    r"manifest\.json|lock|(vectors|texts|checks|manifest)-\w+\.(safetensors|jsonl|tmp)"
    rf"|{SPOOL}\w+"
    r"|\.tmp\w{6}"  # what safetensors writes to before it renames
)


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None


def _remove_others(folder: Path, keep: set[str]) -> None:
    """Remove the files of earlier saves; one that cannot be removed only takes up space."""
    for entry in folder.iterdir():
        if _is_ours(entry.name) and entry.name not in keep and not entry.is_dir():
            entry.unlink(missing_ok=True)


def _remove_unfinished(folder: Path, save_id: str) -> None:
    """Remove what a save has written that did not get as far as its manifest."""
    try:
        current = json.loads((folder / MANIFEST).read_text())["files"]["vectors"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        current = ""
    if save_id not in current and folder.is_dir():
        for entry in folder.glob(f"*-{save_id}.*"):
            entry.unlink(missing_ok=True)
