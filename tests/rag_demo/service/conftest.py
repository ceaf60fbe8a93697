"""Fixtures of the service's tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def freeze_heap() -> Iterator[None]:
    """Keep the garbage collections of releases short.

    A service releases its models when it stops, and each release collects garbage. Frozen objects
    of pytest and torch are not traversed.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small index that no test changes."""
    from tests.support.serving import make_index

    return make_index(tmp_path_factory.mktemp("service") / "index")
