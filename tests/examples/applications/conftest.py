"""What the applications run in, if they need packages beyond the development environment."""

from __future__ import annotations

import pytest

from tests.support.programs import ROOT

collect_ignore = ["programs"]  # One of them is a suite of tests.


@pytest.fixture(scope="session")
def applications_python() -> str:
    """Return the Python that sees the dependency group `applications` too."""
    if not (ROOT / ".venv" / ".applications").exists():
        pytest.skip("run `make test-slow`, which builds .venv/applications")
    return str(ROOT / ".venv" / "applications" / "bin" / "python")
