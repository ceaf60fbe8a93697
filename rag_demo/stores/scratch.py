"""A temporary folder of one process."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from rag_demo.database import FORK_AWARE


class Scratch:
    """A temporary folder, made on first use and removed by `close`, at the latest at exit.

    A forked child gets a folder of its own. A killed process leaves its folder behind.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._remove: weakref.finalize[Any, Any] | None = None
        FORK_AWARE.add(self)

    def folder(self) -> Path:
        """Return the folder."""
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rag-demo-"))
            self._remove = weakref.finalize(self, shutil.rmtree, folder, True)
            self._folder = folder
        return self._folder

    def close(self) -> None:
        """Remove the folder."""
        if self._remove is not None:
            self._remove()
        self._folder = None

    def leave_to_parent(self) -> None:
        """In a forked child, forget the folder of the parent process."""
        if self._remove is not None:
            self._remove.detach()
        self._folder = None
