"""The fixture of the matrix."""

from __future__ import annotations

import pytest

from tests.torch_utils.hazards.runner import Runner


@pytest.fixture(scope="session")
def runner() -> Runner:
    return Runner()
