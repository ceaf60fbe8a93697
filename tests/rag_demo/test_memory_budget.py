"""A memory budget does not change the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rag_demo.search.reference import GivenVectors, check_all, filled, normal
from tests.support.retriever_kinds import OnCpu


@pytest.mark.slow
def test_index_larger_than_the_memory_budget_is_exact(tmp_path: Path) -> None:
    model = GivenVectors(normal(20_000, 64), normal(6, 64, seed=1))
    with OnCpu(model) as writer:
        index = filled(writer, model)
        writer.save(tmp_path / "index")
    with OnCpu(model, memory_budget=1 << 20) as retriever:
        retriever.load(tmp_path / "index")
        check_all(retriever, index, 7)
        check_all(retriever, index, 7, where={"even": True})
        assert retriever.delete(["7", "77"]) == index.delete(["7", "77"]) == 2
        retriever.add(["9"], [{}], ["new"])
        index.add(["9"], [{}], ["new"])
        check_all(retriever, index, 7)
