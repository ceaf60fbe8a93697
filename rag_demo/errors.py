"""Every error that this package raises on purpose: what happened, and what to do about it."""

from __future__ import annotations

__all__ = ["IndexFileError", "ModelError", "ModelMismatchError", "RagDemoError", "SourceError"]


class RagDemoError(Exception):
    """The base of this package's errors; its text is one line."""


class SourceError(RagDemoError):
    """A source of documents is missing, empty or cannot be read."""


class IndexFileError(RagDemoError):
    """A saved index is missing, damaged or of another kind."""


class ModelMismatchError(IndexFileError):
    """A saved index was made with another embedding model."""


class ModelError(RagDemoError):
    """An embedding model cannot be loaded."""
