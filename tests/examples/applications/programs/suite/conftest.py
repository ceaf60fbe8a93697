"""The option --runslow of pytest's documentation, and what the tests share."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", default=False, help="run slow tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: mark test as slow to run")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--runslow"):
        # --runslow given in cli: do not skip slow tests
        return
    skip_slow = pytest.mark.skip(reason="need --runslow option to run")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip_slow)


@pytest.fixture(scope="session")
def embeddings():
    import torch  # Not every session runs tests that need it.

    torch.manual_seed(0)
    return torch.nn.Embedding(1000, 1024)


@pytest.fixture
def journal(request: pytest.FixtureRequest) -> Path:
    """The journal of a test. It stays, because a release at exit comes after the test."""
    folder = Path(__file__).parent / "journals"
    folder.mkdir(exist_ok=True)
    return folder / request.node.name


@pytest.fixture
def classifier(embeddings, journal: Path):
    from classifier import Classifier

    with Classifier(embeddings, journal) as classifier:
        yield classifier
