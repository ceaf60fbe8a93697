"""Short runs of the tortures; the long ones are ``make torture-save`` and ``make fuzz-index``."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file
from torture import check_whole, fuzz_index, make, torture_save

from rag_demo.errors import IndexFileError
from rag_demo.index import write_index


def test_saves_that_are_killed() -> None:
    """The old index or the new one, after every kill."""
    result = torture_save(15)
    assert result["different_states"] > 3  # The kills did come at different moments.


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
