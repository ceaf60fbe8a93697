"""What the service's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def heap_of_others_put_aside() -> Iterator[None]:
    """Let the collections of a service's releases walk what it has made, not pytest and torch.

    A service releases its models when it ends: most of what a test of one would cost. What those
    collections are worth on a whole heap is tested in tests/torch_utils/releasing.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small index, which no test changes."""
    from support.serving import make_index

    return make_index(tmp_path_factory.mktemp("service") / "index")
