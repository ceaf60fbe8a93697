"""An index that cannot be read at present may be whole: it is not called damaged, or replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import run
from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError, OtherIndexError, UnreadableIndexError, damaged
from rag_demo.index import read_index, read_manifest, write_index
from rag_demo.ingest import ingest
from rag_demo.storage import saving

DOCUMENTS = [Document(str(n), f"text {n}", {}) for n in range(5)]


class Model:
    name, dimension = "m", 4
    embedded = 0

    def embed_documents(self, texts: list[str]) -> Any:
        Model.embedded += len(texts)
        return np.ones((len(texts), 4), np.float32)

    def embed_query(self, text: str) -> Any:
        return np.ones(4, np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ingest(DOCUMENTS, Model(), tmp_path / "i", source="one")
    Model.embedded = 0
    return tmp_path / "i"


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let opening fail: of files whose name begins so, with this error."""
    opens = os.open

    def make(name: str, code: int) -> None:
        def refusing(path: Any, *arguments: Any, **more: Any) -> int:
            if Path(path).name.startswith(name):
                raise OSError(code, os.strerror(code), str(path))
            return opens(path, *arguments, **more)

        monkeypatch.setattr(os, "open", refusing)

    return make


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["manifest.json", "vectors", "texts", "checks"])
def test_it_is_not_replaced_unasked(
    folder: Path, unreadable: Any, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """One error that says what the system says; nothing is embedded, and the index stays."""
    before = read_manifest(folder)
    unreadable(name, code)
    with pytest.raises(UnreadableIndexError, match=os.strerror(code)) as raised:
        read_index(folder)
    assert "damaged" not in str(raised.value)
    with pytest.raises(UnreadableIndexError):
        ingest(DOCUMENTS, Model(), folder, source="one")
    # That it is another source's stands in the manifest, which can be read or not.
    with pytest.raises((UnreadableIndexError, OtherIndexError)):
        ingest(DOCUMENTS[:1], Model(), folder, source="two")
    if name == "manifest.json":
        with pytest.raises(UnreadableIndexError):
            write_index(folder, "m", np.ones((1, 4), np.float32) / 2, DOCUMENTS[:1])
    assert Model.embedded == 0
    monkeypatch.undo()
    assert read_manifest(folder) == before
    assert len(read_index(folder).documents) == 5


def test_control_what_is_missing_is_damage(folder: Path, unreadable: Any) -> None:
    """A file that is not there makes an index that nobody can use: it is made anew."""
    unreadable("vectors", errno.ENOENT)
    with pytest.raises(IndexFileError, match="damaged") as raised:
        read_index(folder)
    assert not isinstance(raised.value, UnreadableIndexError)
    for code, kind in ((errno.ENOENT, IndexFileError), (errno.EMFILE, UnreadableIndexError)):
        assert type(damaged(folder, OSError(code, "why"))) is kind


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_end_of_a_save_reads_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    unreadable: Callable[[str, int], None],
    is_replaced: bool,
) -> None:
    """Interrupted, and the manifest cannot be read any more: all of it stays, or goes."""
    before = sorted(path.name for path in folder.iterdir())
    replace = saving.replace_manifest

    def replacing(*arguments: Any) -> None:
        if is_replaced:
            replace(*arguments)
        unreadable("manifest", errno.EMFILE)
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "replace_manifest", replacing)
    with pytest.raises(KeyboardInterrupt):
        write_index(folder, "m", np.ones((2, 4), np.float32) / 2, DOCUMENTS[:2])
    monkeypatch.undo()
    if is_replaced:
        assert len(read_index(folder).documents) == 2
    else:
        assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError()",
        'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried")',
        'RuntimeError("can\'t start new thread")',
    ],
)
def test_no_memory_is_one_line(error: str) -> None:
    """Whoever raises it: what to do about it, and no traceback."""
    program = f"""
        import rag_demo.commands, rag_demo.cli
        def run(arguments):
            raise {error}
        rag_demo.commands.run = run
        rag_demo.cli.main()
    """
    done = run(program)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("rag-demo: error: there is not enough memory; a smaller --batch-size")
