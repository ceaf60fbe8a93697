"""Every error that this package raises on purpose: what happened, and what to do about it."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "AGAIN",
    "IndexFileError",
    "ModelError",
    "ModelMismatchError",
    "NewerIndexError",
    "OtherIndexError",
    "RagDemoError",
    "SourceError",
    "damaged",
]

AGAIN = "make it again with: rag-demo index SOURCE --out"

HOW_TO_INSTALL = (
    "install what is missing with: pip install '.[rag,model]', in a clone of torch-cleanup"
)


class RagDemoError(Exception):
    """The base of this package's errors; its text is one line."""


class SourceError(RagDemoError):
    """A source of documents is missing, empty or cannot be read."""


class IndexFileError(RagDemoError):
    """A saved index is missing, damaged or of another kind."""


class ModelMismatchError(IndexFileError):
    """A saved index was made with another embedding model."""


class NewerIndexError(IndexFileError):
    """A saved index was made by a newer version."""


class OtherIndexError(IndexFileError):
    """A folder holds an index that is not to be replaced unasked: ask, or ``replace=True``."""


class ModelError(RagDemoError):
    """An embedding model cannot be loaded."""


def damaged(path: Path, reason: object) -> IndexFileError:
    """Make the error for a file that is not what was written."""
    return IndexFileError(f"{path} is damaged ({reason}); {AGAIN} {path.parent}")
