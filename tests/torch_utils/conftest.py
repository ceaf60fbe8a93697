"""Fixtures of the tests of torch_utils."""

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Freeze the heap, so that full collections skip what was there before.

    The holders among that are not found then.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def app(frozen_heap: None) -> Iterator[Any]:
    """Return a new module. A census then walks over little more than its variables."""
    module = sys.modules["app"] = ModuleType("app")
    yield module
    del sys.modules["app"]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
