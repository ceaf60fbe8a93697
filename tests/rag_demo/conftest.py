"""What the tests of the service share."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the tests that are coroutines with asyncio, as uvicorn does."""
    return "asyncio"
