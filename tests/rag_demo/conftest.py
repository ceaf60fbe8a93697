"""What the tests of the service share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the tests that are coroutines with asyncio, as uvicorn does."""
    return "asyncio"
