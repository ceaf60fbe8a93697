"""`PgVectorRetriever` keeps the contract of `contract.py`, on a real server."""

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see CONTRIBUTING.md")
from rag_demo import PgVectorRetriever

CHECKS = runpy.run_path(str(Path(__file__).parents[1] / "contract.py"))["CHECKS"]


class PostgresPlace:
    """Tables of a database. Every change is durable at once."""

    keeps_nul = False

    def __init__(self, url: str, table: str) -> None:
        self.url, self.table = url, table
        place = f"runpy.run_path({__file__!r})['PostgresPlace']({url!r}, {table!r})"
        self.source = f"import runpy\nplace = {place}"

    def open(self, model: Any) -> PgVectorRetriever:
        return PgVectorRetriever(model, self.url, self.table)

    def keep(self, retriever: Any) -> None:
        pass


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_retriever_keeps_the_contract(server: Any, table: str, check: Any) -> None:
    check(PostgresPlace(server.url, table))
