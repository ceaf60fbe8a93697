"""Short runs of the tortures; CONTRIBUTING.md has the long ones.

Kills of a save are a check of `tests/rag_demo/contract.py`; those of `rag-demo index`, and what
remains of its work, are in `tests/rag_demo/stores/test_ingest.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rag_demo.durability import ingestion, saves

pytestmark = pytest.mark.slow


def test_save_on_a_full_disk_leaves_the_old_index() -> None:
    result = saves.torture_full_disk(9, seed=1795852282)  # One attempt fails in the commit.
    assert 0 < result["failed"] < result["attempts"]


def test_damaged_index_is_refused_or_right() -> None:
    assert saves.fuzz_index(300)["refused"] > 50


def test_interrupted_ingestion_leaves_a_consistent_index(tiny_model: Path) -> None:
    assert ingestion.torture_interrupts(20, tiny_model)["different_states"] > 1
