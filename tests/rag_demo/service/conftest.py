"""What the service's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small index, which no test changes."""
    from serving import make_index

    return make_index(tmp_path_factory.mktemp("service") / "index")
