"""Saving: everything is looked at and on the disk before the index changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, dump_document
from rag_demo.documents.rows import DocumentRows
from rag_demo.errors import IndexFileError, unwritable
from rag_demo.storage.derived import check_derived, write_derived
from rag_demo.storage.manifest import (
    new_save_id,
    remove_others,
    remove_unfinished,
    replace_manifest,
    unfinished_manifest,
    write_manifest,
)
from rag_demo.storage.writing import BlockWriter

__all__ = ["check_vectors", "save_files"]

_ROWS = 1 << 13  # of vectors that are looked at at once
_LINES_BYTES = 1 << 16  # of documents that are written at once

Vectors = npt.NDArray[np.float32]


def save_files(
    folder: Path,
    described: Mapping[str, Any],
    vectors: Vectors,
    documents: Iterable[Document],
    rows: DocumentRows,
    derived: Mapping[str, npt.NDArray[Any]],
) -> None:
    """Write the files of an index, and put them in place of the earlier ones.

    For who holds the folder's lock. Whatever goes wrong or interrupts, the folder holds the
    earlier index or this one.

    Args:
        folder: Where to.
        described: What the manifest says beside what the files are.
        vectors: Shape (n, d).
        documents: What the index is of.
        rows: Which rows belong to each of them.
        derived: Arrays that are kept beside them.

    Raises:
        IndexFileError: They do not fit together, or cannot be written.
    """
    save_id = new_save_id()
    try:
        with BlockWriter(unfinished_manifest(folder, save_id)) as file:
            manifest = {
                **described,
                **_write_files(folder, save_id, _fitting(vectors, rows), documents, rows, derived),
            }
            write_manifest(file, manifest)
        replace_manifest(folder, save_id)
        remove_others(folder, manifest)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        remove_unfinished(folder, save_id)


def _write_files(
    folder: Path,
    save_id: str,
    vectors: Vectors,
    documents: Iterable[Document],
    rows: DocumentRows,
    derived: Mapping[str, npt.NDArray[Any]],
) -> dict[str, Any]:
    """Write all files but the manifest; return what that has to say of them."""
    check_derived(derived)
    files: dict[str, Path] = {}
    checks: dict[str, npt.NDArray[Any]] = {}

    def new(what: str, kind: str) -> BlockWriter:
        files[what] = folder / f"{what}-{save_id}.{kind}"
        return BlockWriter(files[what])

    with new("vectors", "safetensors") as file:
        _write_vectors(file, vectors)
        checks["vectors"] = file.finish()
    with new("texts", "jsonl") as file:
        checks |= _write_documents(file, documents, rows)
        checks["texts"] = file.finish()
    manifest: dict[str, Any] = {"count": len(vectors), "dimension": int(vectors.shape[1])}
    if derived:
        with new("derived", "arrays") as file:
            manifest["derived"] = write_derived(file, derived)
            checks["derived"] = file.finish()
    with new("checks", "safetensors") as file:
        content = _safetensors(checks)
        file.write(content)
        file.finish()
    manifest["checks_sha256"] = hashlib.sha256(content).hexdigest()
    manifest["files"] = {
        what: {"name": path.name, "bytes": path.stat().st_size} for what, path in files.items()
    }
    return manifest


def check_vectors(vectors: Vectors, passed: Callable[[], object] | None = None) -> str | None:
    """Say what is wrong with vectors; None if all are of length 1."""
    for start in range(0, len(vectors), _ROWS):
        some = vectors[start : start + _ROWS]
        lengths = np.einsum("ij,ij->i", some, some)
        good = np.abs(lengths - 1) < 1e-3  # False also where one is not a number.
        if not good.all():
            return f"the vector of row {start + int(np.argmin(good))} is not of length 1"
        if passed is not None:
            passed()
    return None


def _fitting(vectors: Vectors, rows: DocumentRows) -> Vectors:
    array = np.asarray(vectors, np.float32)
    if array.ndim != 2:
        raise IndexFileError(f"vectors must have the shape (n, d), not {array.shape}")
    if len(rows) != len(array):
        raise IndexFileError(f"{len(array)} vectors do not fit documents with {len(rows)} rows")
    bad = check_vectors(array)
    if bad is not None:
        raise IndexFileError(f"an index cannot be saved of these vectors: {bad}")
    return array


def _write_vectors(file: BlockWriter, vectors: Vectors) -> None:
    """Write a file of safetensors: 8 bytes of length, a header of JSON, the data.

    By hand, because the library makes files of another mode, and errors of its own.
    """
    entry = {"dtype": "F32", "shape": list(vectors.shape), "data_offsets": [0, vectors.nbytes]}
    header = json.dumps({"vectors": entry}).encode("ascii")
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for start in range(0, len(vectors), _ROWS):
        file.write(np.ascontiguousarray(vectors[start : start + _ROWS], "<f4"))


def _write_documents(
    file: BlockWriter, documents: Iterable[Document], rows: DocumentRows
) -> dict[str, npt.NDArray[Any]]:
    """Write one line for each; return where each begins, and which rows are whose."""
    offsets = [0]
    seen: set[str] = set()
    lines: list[bytes] = []
    for document in documents:
        line = _line(document)
        seen.add(document.id)
        offsets.append(offsets[-1] + len(line))
        if len(seen) != len(offsets) - 1:
            raise IndexFileError(f"the id {document.id!r} stands twice; ids must differ")
        lines.append(line)
        if offsets[-1] - file.nbytes > _LINES_BYTES:
            file.write(b"".join(lines))
            lines.clear()
    file.write(b"".join(lines))
    if len(seen) != rows.documents:
        raise IndexFileError(f"{len(seen)} documents do not fit rows of {rows.documents}")
    arrays: dict[str, npt.NDArray[Any]] = {"offsets": np.asarray(offsets, np.uint64)}
    if rows.counts is not None and rows.spans is not None:
        arrays |= {"counts": rows.counts, "spans": rows.spans}
    return arrays


def _line(document: Document) -> bytes:
    if not isinstance(document.id, str) or not isinstance(document.text, str):
        raise IndexFileError(f"the id or the text of document {document.id!r} is no string")
    try:
        return dump_document(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise IndexFileError(
            f"the metadata of {document.id!r} cannot be saved as JSON: {error}"
        ) from None


def _safetensors(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
