"""`PgVectorRetriever` keeps the contract of `contract.py`, on a real server."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see make test-postgres")
from rag_demo import PgVectorRetriever

CHECKS = runpy.run_path(str(Path(__file__).parents[1] / "contract.py"))["CHECKS"]


class PostgresPlace:
    """Tables of a database. Every change is durable at once."""

    keeps_nul = False

    def __init__(self, url: str, table: str, approximate: str | None = None) -> None:
        self.url, self.table, self.approximate = url, table, approximate
        self.source = (
            "import runpy\n"
            f"place = runpy.run_path({__file__!r})['PostgresPlace']"
            f"({url!r}, {table!r}, {approximate!r})"
        )

    def open(self, model: Any) -> PgVectorRetriever:
        return PgVectorRetriever(model, self.url, self.table, approximate=self.approximate)

    def keep(self, retriever: Any) -> None:
        pass


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("approximate", [None, "binary", "hnsw"])
def test_retriever_keeps_the_contract(
    server: Any, table: str, check: Any, approximate: str | None
) -> None:
    """So few documents are all candidates, so approximate answers are the same."""
    check(PostgresPlace(server.url, table, approximate))
