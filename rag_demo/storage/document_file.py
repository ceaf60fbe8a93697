"""The documents of a saved index, one to a line, read one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, parse_document
from rag_demo.errors import damaged
from rag_demo.storage.checked_file import CheckedFile

__all__ = ["DocumentFile"]


class DocumentFile:
    """The lines of a file as a `rag_demo.documents.document.DocumentSource`.

    Args:
        file: The lines.
        offsets: Where each begins, and where the last one ends: shape (n + 1,), uint64.

    Raises:
        IndexFileError: The offsets are none.
    """

    def __init__(self, file: CheckedFile, offsets: npt.NDArray[np.uint64]) -> None:
        self._file = file
        self._offsets = offsets
        ordered = bool((offsets[1:] > offsets[:-1]).all())
        if not (len(offsets) and ordered and self._offsets[0] == 0):
            raise damaged(file.path, "its lines are not where they should be")
        if self._offsets[-1] != len(file):
            raise damaged(file.path, "its last line is not where it should be")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def check_all(self) -> None:
        """Check every block of the file."""
        self._file.check_all()

    def read(self, number: int) -> Document:
        """Read one document."""
        line = self._file.read(int(self._offsets[number]), int(self._offsets[number + 1]))
        try:
            return parse_document(bytes(line))
        except ValueError as error:
            raise damaged(self._file.path, str(error)) from None
