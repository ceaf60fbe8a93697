"""Fixtures of the tests of torch_utils."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Freeze the heap, so that the many collections and searches skip what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
