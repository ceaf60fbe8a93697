"""Which model made vectors: known by the content of its files, not by where they lie."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rag_demo.errors import AGAIN, NAME_MODEL, ModelMismatchError

__all__ = ["ModelIdentity", "file_digest", "fingerprint", "identify", "refuse_other_model"]

# What cannot change a vector. All else is taken to: a file too many costs a second embedding,
# one too few is a wrong answer.
_IDLE_SUFFIXES = frozenset(
    {
        *(".md", ".rst", ".html", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"),
        *(".csv", ".tsv", ".log", ".lock", ".pyc"),
        # Weights of frameworks that are not used here.
        *(".onnx", ".h5", ".ot", ".msgpack", ".tflite", ".mlmodel", ".gguf"),
    }
)
# The last: what training leaves beside a model, with its optimizer, many times its size.
_IDLE_FOLDERS = re.compile(r"__pycache__|onnx|openvino|checkpoint-\d+")
_KNOWN_AT_MOST = 1 << 14

_known: dict[tuple[object, ...], str] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class ModelIdentity:
    """What says whether vectors can be compared.

    Attributes:
        name: What a person calls the model, and loads it by: a name, or a folder's full path.
        dtype: What it computes in; None where that is not known.
        fingerprint: Of its files, see `fingerprint`; None for a model without files, which its
            name alone identifies.
    """

    name: str
    dtype: str | None = None
    fingerprint: str | None = None

    def is_same(self, other: ModelIdentity) -> bool:
        """Whether both make the same vectors; names matter only where there are no files."""
        if self.dtype != other.dtype or self.fingerprint != other.fingerprint:
            return False
        return self.fingerprint is not None or self.name == other.name

    def __str__(self) -> str:
        known = [self.dtype, self.fingerprint and f"files {self.fingerprint[:12]}"]
        more = ", ".join(each for each in known if each)
        return f"{self.name!r} ({more})" if more else repr(self.name)


def refuse_other_model(folder: Path, made_by: ModelIdentity, wanted: ModelIdentity) -> None:
    """Refuse an index that another model made.

    Raises:
        ModelMismatchError: It was.
    """
    if not made_by.is_same(wanted):
        raise ModelMismatchError(
            f"the index in '{folder}' was made with the model {made_by}, "
            f"not with {wanted}; name that one: {NAME_MODEL}; or {AGAIN} {folder} --yes"
        )


def identify(path: str, dtype: str, name: str | None = None) -> ModelIdentity:
    """Find out which model lies in a folder, or in the hub's cache by its name.

    Args:
        path: A folder, or a name on the hub. Nobody is asked who is not on this machine.
        dtype: What the model computes in.
        name: What it is called, if not by its folder's full path or its name on the hub.

    Returns:
        Without a fingerprint, if the files are not on this machine.

    Raises:
        OSError: A file cannot be read.
    """
    folder = Path(path)
    if folder.is_dir():
        return ModelIdentity(name or str(folder.resolve()), dtype, fingerprint(folder))
    snapshot = _in_hub_cache(path)
    return ModelIdentity(name or path, dtype, fingerprint(snapshot) if snapshot else None)


def fingerprint(folder: Path) -> str:
    """Digest all files of a model that can decide on its vectors, those of subfolders too.

    Reads them once in a process, 1 GB a second or more, as long as the system says that they
    have not changed; after that it takes a millisecond. Links are followed, so that it does not
    matter by which path a model is reached.

    Raises:
        OSError: A file cannot be read.
    """
    files = sorted(_files(folder))
    with ThreadPoolExecutor(2) as executor:
        digests = list(executor.map(file_digest, (path for _, path in files)))
    whole = hashlib.sha256()
    for (name, _), digest in zip(files, digests, strict=True):
        whole.update(f"{len(name)} {name} {digest}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file; once, as long as it stays the same."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # The time of change too: unlike that of modification nobody can set it back.
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = _known.get(key)
        if known is not None:
            return known
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        after = os.fstat(file.fileno())
    found = digest.hexdigest()
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == key[2:]:
        with _lock:
            if len(_known) >= _KNOWN_AT_MOST:
                _known.clear()
            _known[key] = found
    return found


def _in_hub_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    # sentence-transformers looks under its own name too, for names without an owner.
    for repository in [name] if "/" in name else [f"sentence-transformers/{name}", name]:
        try:
            return Path(snapshot_download(repository, local_files_only=True))
        except (OSError, ValueError):
            continue  # Not there, or no name for a model.
    return None


def _files(
    folder: Path, inside: str = "", above: frozenset[object] = frozenset()
) -> Iterator[tuple[str, Path]]:
    """Yield the files that count, each with its name inside the folder."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return  # A link that leads back up.
    for path in folder.iterdir():
        name = f"{inside}{path.name}"
        if path.name.startswith("."):
            continue
        mode = path.stat().st_mode if path.exists() else 0
        if stat.S_ISDIR(mode) and not _IDLE_FOLDERS.fullmatch(path.name):
            yield from _files(path, f"{name}/", above | {here})
        elif stat.S_ISREG(mode) and path.suffix.lower() not in _IDLE_SUFFIXES:
            yield name, path
