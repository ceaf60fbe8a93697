"""Check after each test that no stub was closed twice."""

import pytest

from tests.support.hosting_stub import Stub


@pytest.fixture(autouse=True)
def fresh(frozen_heap):
    """Releases collect garbage, of which a frozen heap has little."""
    Stub.made = []
    yield
    assert all(stub.closed <= 1 for stub in Stub.made)
