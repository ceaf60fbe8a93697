"""Short runs of the tortures; the long ones are ``make torture-save`` and ``make fuzz-index``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from torture import check_whole, fuzz_index, make, torture_save
from torture_ingest import torture_lines, torture_signals

from rag_demo.documents.document import dump_document
from rag_demo.errors import IndexFileError
from rag_demo.index import write_index
from rag_demo.index_builder import IndexBuilder

# An interrupt between open() and the block that closes leaves the file to its destructor.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.mark.parametrize(("kills", "states"), [(4, 2), pytest.param(15, 4, marks=pytest.mark.slow)])
def test_saves_that_are_killed(kills: int, states: int) -> None:
    """The old index or the new one, after every kill."""
    result = torture_save(kills)
    assert result["different_states"] >= states  # The kills did come at different moments.


def test_mutated_files() -> None:
    """One clear error or the right content; no crash, and no absurd amount of memory."""
    result = fuzz_index(500)
    assert result["refused"] > 300


def test_control_a_mixture_is_noticed(tmp_path: Path) -> None:
    """Vectors of one save among the texts of another do not pass the check."""
    write_index(tmp_path / "i", *make(1))
    (vectors,) = (tmp_path / "i").glob("vectors-*")
    save_file({"vectors": make(2)[1]}, vectors)
    with pytest.raises((IndexFileError, AssertionError)):
        check_whole(tmp_path / "i")


def test_ingestions_that_are_interrupted_at_any_line() -> None:
    """The old index or a part of the new one, and never twice the same document."""
    assert torture_lines(8)["different_states"] > 1


@pytest.mark.slow
def test_ingestions_that_are_interrupted_at_any_moment() -> None:
    """By signals, from outside."""
    torture_signals(2)


@pytest.mark.slow
def test_control_half_a_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that counts a batch before it is written does not pass."""
    torture_lines(3, withins=(("_write",),))
    write = IndexBuilder._write

    def hasty(self: Any, made: Any, documents: Any, after: Any = None) -> Any:
        before, some = after or self._taken, list(documents)
        if after is None:
            self._taken = type(before)(
                before.documents + len(some),
                before.batches + 1,
                before.rows + len(made.rows),
                before.documents_bytes + sum(len(dump_document(each)) for each in some),
                before.vectors_bytes + made.vectors.nbytes,
            )
        return write(self, made, some, before)

    monkeypatch.setattr(IndexBuilder, "_write", hasty)
    with pytest.raises((AssertionError, IndexFileError)):
        torture_lines(8, withins=(("_write",),))
