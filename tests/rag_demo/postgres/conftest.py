"""A real server for each process of tests, and a new table for each test."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.postgres_server import PostgresServer

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="psycopg is not installed: see CONTRIBUTING.md")
    found = PostgresServer()
    yield found
    found.close()


@pytest.fixture
def table(server: Any) -> str:
    """A name that no table has."""
    return f"notes_{next(_NUMBERS)}"
