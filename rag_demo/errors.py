"""The errors that this package raises on purpose. Each message says what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HOW_TO_CREATE = "make one with: rag-demo index SOURCE --out FOLDER"
HOW_TO_REBUILD = "make it again with: rag-demo index SOURCE --out"
HOW_TO_NAME_MODEL = "--model FOLDER, or EmbeddingModel(FOLDER)"

_MOST_CHARS = 200  # of a quoted value


class RagDemoError(Exception):
    """The base class of this package's errors. The message is one line."""


class SourceError(RagDemoError):
    """A source of documents is missing, empty or unreadable."""


class IndexFileError(RagDemoError):
    """A saved index is missing, damaged or of another kind."""


class MissingIndexError(IndexFileError):
    """There is no index in a folder."""


class DamagedIndexError(IndexFileError):
    """A saved index differs from what was written."""


class ModelMismatchError(IndexFileError):
    """A saved index was made with another embedding model."""


class IndexVersionError(IndexFileError):
    """A saved index has a format version that this program cannot read."""


class OtherIndexError(IndexFileError):
    """A folder holds an index of another source or model, and ``replace`` is false."""


class IndexChangedError(IndexFileError):
    """Another program has changed an index since this one loaded or saved it."""


class UnreadableIndexError(IndexFileError):
    """A saved index cannot be read at present. It may be intact, so nothing replaces it."""


class WriterBusyError(IndexFileError):
    """Another process or thread is writing the index."""


class PostgresError(RagDemoError):
    """The database cannot be reached, or it refused a statement. The message has no password."""


class InvalidValueError(RagDemoError, ValueError):
    """A value cannot be used, such as a device, a language, or a text that a database refuses."""


class ModelError(RagDemoError):
    """An embedding model or a reranker cannot be loaded, or gives vectors that are not finite."""


class BadVectorsError(ModelError, ValueError):
    """Vectors are zero or not finite.

    Attributes:
        rows: Which ones, with what is wrong.
        vectors: All of them, the others with length 1: shape (n, d).
    """

    def __init__(self, rows: Mapping[int, str], vectors: Any, name: str = "") -> None:
        self.rows, self.vectors = rows, vectors
        row, what = next(iter(rows.items()))
        name = name or f"vector {row}"
        super().__init__(f"{name} is {what}; cosine search needs finite, nonzero vectors")


def damaged(path: Path, reason: object) -> DamagedIndexError:
    """Make the error for an index file that is damaged."""
    return DamagedIndexError(
        f"'{path}' is damaged ({reason}); {HOW_TO_REBUILD} {path.parent} --yes, "
        "and add its other sources again, if there were any"
    )


def advice(error: ImportError, extra: str = "") -> str:
    """Return what to do about a failed import.

    Args:
        error: The error of the import.
        extra: The extra that has the package; by default those of the whole package.
    """
    if (error.name or "").partition(".")[0] == "torch_utils":
        hidden_by = getattr(sys.modules.get("torch_utils"), "__file__", "another package")
        return (
            f"{hidden_by} hides the torch_utils of torch-cleanup: start in another folder, rename "
            "that one, or run pip uninstall torch-utils"
        )
    how = f"'.[{extra}]'" if extra else "'.[rag,model]' (and '.[postgres]' for a database)"
    return f"install it with: pip install {how}, in a clone of torch-cleanup"


@contextlib.contextmanager
def required(what: str, error: type[Exception] = RagDemoError, extra: str = "") -> Iterator[None]:
    """Say what to install if an import in the block fails.

    Args:
        what: What needs the package.
        error: The type of the error.
        extra: As for `advice`.
    """
    try:
        yield
    except ImportError as failed:
        if not isinstance(failed, ModuleNotFoundError) and failed.name != "torch_utils":
            raise
        raise error(f"{what} needs {failed.name}; {advice(failed, extra)}") from None


def short_repr(value: object) -> str:
    """Return the beginning of a value's repr, for messages."""
    try:
        text = repr(value)
    except Exception:  # The repr is the caller's code; and long integers have no repr.
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def check_positive(what: str, value: object) -> None:
    """Check that an argument is None or a positive whole number.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is not positive.
    """
    if value is not None and (type(value) is not int or value < 1):
        error = ValueError if type(value) is int else TypeError
        raise error(f"{what} must be a positive whole number, got {short_repr(value)}")


def check_device(device: str | None) -> None:
    """Check that torch can compute on a device; None is the best one.

    Raises:
        TypeError: It is not str.
        InvalidValueError: torch does not know it, or this machine does not have it.
    """
    if device in (None, "cpu"):
        return
    if not isinstance(device, str):
        raise TypeError(f"device must be str, got {device!r}")
    import torch

    try:
        torch.zeros(1, device=device).item()  # Tensors on the device meta have no values.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidValueError(f"the device {device!r} cannot be used: {reason}") from None


def checked_texts(values: Any, what: str) -> list[str]:
    """Return a caller's sequence of str as a list.

    Raises:
        TypeError: It is one str or not a sequence, or one of its items is not str.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        kind = "one str" if isinstance(values, str) else short_repr(values)
        raise TypeError(f"{what} must be a sequence of str, got {kind}; pass a list")
    texts = list(values)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"{what}[{number}] must be str, got {kind} {short_repr(text)}")
    return texts
