"""Every stub is closed once at most, whatever a test does."""

from __future__ import annotations

import pytest

from support.hosting_stub import Stub


@pytest.fixture(autouse=True)
def fresh():
    Stub.made = []
    yield
    assert all(stub.closed <= 1 for stub in Stub.made)
