"""The manifest: which files of a folder belong together. Replacing it is what changes an index."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_demo.errors import AGAIN, IndexFileError, NewerIndexError, damaged
from rag_demo.storage.checked_file import open_regular, read_at
from rag_demo.storage.writing import LOCK, BlockWriter, sync

__all__ = [
    "MANIFEST",
    "SPOOL",
    "VERSION",
    "entry_of",
    "is_ours",
    "new_save_id",
    "read_manifest",
    "refuse_foreign_folder",
    "remove_others",
    "remove_unfinished",
    "replace_manifest",
    "unfinished_manifest",
    "write_manifest",
]

FORMAT = "rag-demo index"
VERSION = 4
_READABLE = (3, 4)
MANIFEST = "manifest.json"
SPOOL = "texts-spool-"  # a folder that an ingestion of an earlier version has left behind
_MOST_BYTES = 1 << 20
_OURS = re.compile(
    r"manifest\.json|lock"
    r"|(vectors|texts|checks|derived|manifest)-\w+\.(safetensors|jsonl|arrays|tmp)"
    rf"|{SPOOL}\w+"
    r"|\.tmp\w{6,8}"  # of an ingestion; safetensors wrote to such before it renamed
)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check what describes an index.

    Returns:
        Among others "model" and, since version 4, what else says which model that is ("dtype",
        "fingerprint"), the "source" of an ingestion, and whether it was "finished".

    Raises:
        NewerIndexError: It is from a newer version.
        IndexFileError: It is missing, damaged, or of another kind.
    """
    path = folder / MANIFEST
    try:
        manifest = _load(path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            why = f"does not exist; {AGAIN} {folder}"
        elif not folder.is_dir():
            why = "is no folder; name that of an index"
        else:  # An index is not made where other files are.
            is_empty = not any(folder.iterdir())
            why = f"holds no index; {AGAIN} {folder if is_empty else 'another folder'}"
        raise IndexFileError(f"'{folder}' {why}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFileError(f"'{path}' is not a rag-demo index; {AGAIN} another folder")
    version = manifest.get("version")
    if version not in _READABLE:
        is_newer = type(version) is int and version > VERSION
        raise (NewerIndexError if is_newer else IndexFileError)(
            f"'{path}' has format version {version!r}, this rag-demo reads "
            f"{' and '.join(map(str, _READABLE))}; upgrade it, or {AGAIN} {folder}"
        )
    if manifest.pop("sha256", None) != digest(manifest):
        raise damaged(path, "its checksum is wrong")
    model, count, dimension = (manifest.get(key) for key in ("model", "count", "dimension"))
    numbers = all(type(n) is int and n >= 0 for n in (count, dimension))
    others = (manifest.get(key) for key in ("dtype", "fingerprint", "source"))
    strings = isinstance(model, str) and all(isinstance(each, (str, type(None))) for each in others)
    if not (strings and numbers):
        raise damaged(path, "an entry is missing or of the wrong type")
    return manifest


def entry_of(folder: Path, manifest: dict[str, Any], what: str) -> tuple[Path, int]:
    """Return where a file of the index is, and how many bytes it has to have.

    Raises:
        IndexFileError: The manifest does not say, or names a file that is none of ours.
    """
    files = manifest.get("files")
    entry = files.get(what) if isinstance(files, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    nbytes = entry.get("bytes") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not is_ours(name) or type(nbytes) is not int or nbytes < 0:
        raise damaged(folder / MANIFEST, f"it does not name its {what}")
    return folder / name, nbytes


def digest(manifest: dict[str, Any]) -> str:
    """Compute the checksum that a manifest carries."""
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def new_save_id() -> str:
    """Make what the names of one save's files end with."""
    return uuid.uuid4().hex[:12]


def unfinished_manifest(folder: Path, save_id: str) -> Path:
    """Name the manifest in the making: the first file of a save, and there until it counts."""
    return folder / f"manifest-{save_id}.tmp"


def write_manifest(file: BlockWriter, manifest: Mapping[str, Any]) -> None:
    """Write what describes an index, with its checksum, and wait until it is on the disk."""
    described = {"format": FORMAT, "version": VERSION, **manifest}
    described["sha256"] = digest(described)
    file.write(json.dumps(described, indent=2).encode("ascii") + b"\n")
    file.finish()


def replace_manifest(folder: Path, save_id: str) -> None:
    """Make the index another one, all at once."""
    unfinished_manifest(folder, save_id).replace(folder / MANIFEST)
    sync(folder)


def remove_others(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove the files of earlier saves; one that cannot be removed only takes up space."""
    keep = {entry["name"] for entry in manifest["files"].values()} | {MANIFEST, LOCK}
    for entry in folder.iterdir():
        if is_ours(entry.name) and entry.name not in keep and not entry.is_dir():
            _remove(entry)


def remove_unfinished(folder: Path, save_id: str) -> None:
    """Remove what a save has written that did not get as far as its manifest.

    Nothing is read for that, which could fail as well: the save counts if its unfinished manifest
    is gone. That goes last, so that an interrupted removal is known for one.
    """
    unfinished = unfinished_manifest(folder, save_id)
    if os.path.lexists(unfinished):
        for entry in folder.glob(f"*-{save_id}.*"):
            if entry != unfinished:
                _remove(entry)
        _remove(unfinished)


def _load(path: Path) -> Any:
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > _MOST_BYTES:
            raise ValueError("it is far too large")
        content = bytearray(size)
        read_at(descriptor, content)
    return json.loads(content.decode("utf-8"))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # What was to be written is; the next save tries again.


def is_ours(name: str) -> bool:
    """Whether a file of this name is part of an index, or left over from one."""
    return _OURS.fullmatch(name) is not None


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse to write among files that are not an index.

    Raises:
        IndexFileError: The folder is a file, cannot be read, or holds other things.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise IndexFileError(f"'{folder}' is a file; name a folder for the index")
        if not folder.is_dir() or _is_manifest(folder / MANIFEST):
            return
        others = [entry.name for entry in folder.iterdir() if not is_ours(entry.name)]
    except OSError as error:
        raise IndexFileError(f"'{folder}' cannot be read: {error.strerror}") from error
    if others:
        raise IndexFileError(
            f"'{folder}' holds other files ({others[0]}); name a new or empty folder"
        )


def _is_manifest(path: Path) -> bool:
    """Whether it is a manifest of ours, of whatever version; False where there is none.

    Raises:
        IndexFileError: It is another program's.
    """
    try:
        manifest = _load(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return False  # Damaged: ours only if all that is beside it is ours.
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFileError(
            f"'{path}' is another program's and would be replaced; name another folder"
        )
    return True
