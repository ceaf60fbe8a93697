"""Every error that this package raises on purpose: what happened, and what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

__all__ = [
    "AGAIN",
    "MAKE_ONE",
    "NAME_MODEL",
    "IndexFileError",
    "DamagedIndexError",
    "ModelError",
    "ModelMismatchError",
    "NewerIndexError",
    "OtherIndexError",
    "RagDemoError",
    "SourceError",
    "UnreadableIndexError",
    "WriterBusyError",
    "damaged",
    "shown",
    "unwritable",
]

_SHOWN_CHARS = 200

MAKE_ONE = "make one with: rag-demo index SOURCE --out FOLDER"
AGAIN = "make it again with: rag-demo index SOURCE --out"

NAME_MODEL = "--model FOLDER, or EmbeddingModel(FOLDER)"

HOW_TO_INSTALL = (
    "install what is missing with: pip install '.[rag,model]', in a clone of torch-cleanup"
)


class RagDemoError(Exception):
    """The base of this package's errors; its text is one line."""


class SourceError(RagDemoError):
    """A source of documents is missing, empty or cannot be read."""


class IndexFileError(RagDemoError):
    """A saved index is missing, damaged or of another kind."""


class DamagedIndexError(IndexFileError):
    """A saved index is not what was written."""


class ModelMismatchError(IndexFileError):
    """A saved index was made with another embedding model."""


class NewerIndexError(IndexFileError):
    """A saved index was made by a newer version."""


class OtherIndexError(IndexFileError):
    """A folder holds an index that is not to be replaced unasked: ask, or ``replace=True``."""


class UnreadableIndexError(IndexFileError):
    """A saved index cannot be read at present, and may be whole: it is not to be replaced."""


class WriterBusyError(IndexFileError):
    """Another process, or another thread, is writing the index."""


class ModelError(RagDemoError):
    """An embedding model cannot be loaded."""


# What the system says of a file that is not there, or is something else. Whatever else it says,
# too many open files, no memory, no permission, is no word about what is in the file.
_OF_THE_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


def damaged(path: Path, reason: object) -> IndexFileError:
    """Make the error for a file that is not what was written, or cannot be read at all."""
    if isinstance(reason, OSError) and reason.errno not in _OF_THE_FILE:
        return UnreadableIndexError(
            f"'{path}' cannot be read: {reason.strerror}; fix that, and try again"
        )
    return DamagedIndexError(f"'{path}' is damaged ({reason}); {AGAIN} {path.parent}")


def unwritable(folder: Path, error: OSError, what: str = "") -> IndexFileError:
    """Make the error for an index that the system lets nobody write."""
    return IndexFileError(
        f"the index cannot be written to '{folder}': {what}{error.strerror or error}; "
        "fix that, or name another folder"
    )


def shown(value: object) -> str:
    """Return what a message quotes of a value that somebody gave: the beginning of its repr."""
    try:
        text = repr(value)
    except Exception:  # The program's own code; or a number of more digits than Python writes.
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
