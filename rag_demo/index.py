"""The saved index: a folder that is always the old one or the new one, never a mixture.

``manifest.json`` names the files that belong together, with their sizes and SHA-256. The
files of a save get names of their own; renaming the new manifest over the old one is the one
moment in which the index changes. Arrays are safetensors, texts are JSON lines: nothing here
can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import IndexFileError, ModelMismatchError

__all__ = ["SavedIndex", "read_index", "read_manifest", "write_index"]

FORMAT = "rag-demo index"
VERSION = 1
MANIFEST = "manifest.json"
_AGAIN = "make it again with: rag-demo index SOURCE --out"


@dataclass(frozen=True)
class SavedIndex:
    """What an index folder holds.

    Attributes:
        model: The embedding model that made the vectors.
        vectors: Shape (n, d), float32, each of length 1.
        ids: A name for each row.
        texts: The document of each row.
        metadata: What was given with each.
    """

    model: str
    vectors: npt.NDArray[np.float32]
    ids: Sequence[str]
    texts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]


def write_index(folder: Path, index: SavedIndex) -> None:
    """Write an index, replacing the one in the folder once everything is on the disk.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or the metadata
            are not JSON.
    """
    from safetensors.numpy import save_file

    refuse_foreign_folder(folder)
    save_id = uuid.uuid4().hex[:12]
    vectors = folder / f"vectors-{save_id}.safetensors"
    texts = folder / f"texts-{save_id}.jsonl"
    try:
        lines = "".join(
            json.dumps({"id": name, "text": text, "metadata": dict(metadata)}, ensure_ascii=True)
            + "\n"
            for name, text, metadata in zip(index.ids, index.texts, index.metadata, strict=True)
        )
    except TypeError as error:
        raise IndexFileError(f"the metadata cannot be saved as JSON: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"vectors": np.ascontiguousarray(index.vectors)}, vectors)
        texts.write_text(lines, encoding="ascii")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "model": index.model,
            "count": len(index.ids),
            "dimension": int(index.vectors.shape[1]),
            "files": {"vectors": _describe(vectors), "texts": _describe(texts)},
        }
        for path in (vectors, texts):
            _sync(path)
        _replace_manifest(folder, manifest, save_id)
    except OSError as error:
        raise IndexFileError(f"the index cannot be written to {folder}: {error}") from error
    _remove_others(folder, keep={vectors.name, texts.name, MANIFEST})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check what describes an index.

    Raises:
        IndexFileError: It is missing, damaged, of another kind, or from a newer version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "holds no index" if folder.is_dir() else "does not exist"
        raise IndexFileError(f"{folder} {what}; {_AGAIN} {folder}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFileError(f"{path} is not a rag-demo index; {_AGAIN} another folder")
    if manifest.get("version") != VERSION:
        raise IndexFileError(
            f"{path} has format version {manifest.get('version')!r}, this rag-demo reads "
            f"{VERSION}; upgrade it, or {_AGAIN} {folder}"
        )
    model, count, dimension = (manifest.get(key) for key in ("model", "count", "dimension"))
    if not (isinstance(model, str) and isinstance(count, int) and isinstance(dimension, int)):
        raise _damaged(path, "an entry is missing or of the wrong type")
    return manifest


def read_index(folder: Path, *, expected_model: str | None = None) -> SavedIndex:
    """Read an index, checked against its checksums.

    Args:
        folder: Where it is.
        expected_model: The embedding model that will be asked; None accepts any.

    Raises:
        IndexFileError: A file is missing, damaged, of another kind, or from a newer version.
        ModelMismatchError: Another model made it.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    manifest = read_manifest(folder)
    if expected_model is not None and manifest["model"] != expected_model:
        raise ModelMismatchError(
            f"the index in {folder} was made with the model {manifest['model']!r}, "
            f"not with {expected_model!r}; use that model, or {_AGAIN} {folder}"
        )
    vectors_path, vectors_bytes = _checked(folder, manifest, "vectors")
    try:
        vectors = load(vectors_bytes)["vectors"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise _damaged(vectors_path, str(error)) from None
    texts_path, texts_bytes = _checked(folder, manifest, "texts")
    records = _records(texts_path, texts_bytes)
    if vectors.dtype != np.float32 or vectors.shape != (manifest["count"], manifest["dimension"]):
        raise _damaged(vectors_path, f"its vectors are {vectors.dtype} {vectors.shape}")
    if len(records) != manifest["count"]:
        raise _damaged(texts_path, f"it holds {len(records)} texts, not {manifest['count']}")
    return SavedIndex(
        model=manifest["model"],
        vectors=vectors,
        ids=[record["id"] for record in records],
        texts=[record["text"] for record in records],
        metadata=[record["metadata"] for record in records],
    )


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


def _records(path: Path, content: bytes) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    try:
        for line in content.decode("ascii").splitlines():
            record = json.loads(line)
            if not (
                isinstance(record, dict)
                and isinstance(record.get("id"), str)
                and isinstance(record.get("text"), str)
                and isinstance(record.get("metadata"), dict)
            ):
                raise ValueError(f"line {len(records) + 1} is no record")
            records.append(record)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    return records


def _checked(folder: Path, manifest: dict[str, Any], part: str) -> tuple[Path, bytes]:
    """Read a file of the index, if it is the one that the manifest describes."""
    files = manifest.get("files")
    entry = files.get(part) if isinstance(files, dict) else None
    if not isinstance(entry, dict) or not _is_ours(str(entry.get("name"))):
        raise _damaged(folder / MANIFEST, f"it does not name its {part}")
    path = folder / entry["name"]
    try:
        if path.stat().st_size != entry.get("bytes"):
            raise _damaged(path, f"it has {path.stat().st_size} bytes, not {entry.get('bytes')}")
        content = path.read_bytes()
    except OSError as error:
        raise _damaged(path, str(error)) from None
    if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise _damaged(path, "its checksum is wrong")
    return path, content


def _damaged(path: Path, reason: str) -> IndexFileError:
    return IndexFileError(f"{path} is damaged ({reason}); {_AGAIN} {path.parent}")


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _replace_manifest(folder: Path, manifest: dict[str, Any], save_id: str) -> None:
    new = folder / f"manifest-{save_id}.tmp"
    new.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(new)
    new.replace(folder / MANIFEST)
    _sync(folder)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_ours(name: str) -> bool:
    return name == Path(name).name and (
        name == MANIFEST
        or (
            name.startswith(("vectors-", "texts-", "manifest-"))
            and name.endswith((".safetensors", ".jsonl", ".tmp"))
        )
    )


def _remove_others(folder: Path, keep: set[str]) -> None:
    """Remove the files of earlier saves; one that cannot be removed only takes up space."""
    for entry in folder.iterdir():
        if _is_ours(entry.name) and entry.name not in keep:
            entry.unlink(missing_ok=True)
