"""The order of all tests, and what they share: a tiny model, and how a run ends."""

import fcntl
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.other_pythons import other_pythons
from tests.support.tiny_model import write_tiny_model
from tests.support.zygotes import ZYGOTES

pytest_plugins = ["pytester"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two workers on two cores: threads of torch that wait for each other by spinning keep those from
# running that they wait for. Sleeping instead makes the tests with torch three times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Some thousand interpreters are started: each would compile the packages again; and pytest would
# rewrite each file of tests in each worker of each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts background jobs with SIGINT ignored, and the tests' programs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"other Pythons: {', '.join(other_pythons()) or 'none was found'}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the files that import torch, faiss or rag_demo where torch is not installed."""
    if collection_path.suffix != ".py" or find_spec("torch"):
        return None
    source = collection_path.read_text(encoding="utf-8")
    return bool(re.search(r"^(import|from) (torch|faiss|rag_demo)\b", source, re.M)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests of `release`, which walk the whole heap, then the groups, then the rest.

    What others import makes the heap several times as large. One worker runs a group alone; a group
    that comes last keeps it busy when the others have nothing left.
    """

    def turn(item: pytest.Item) -> int:
        walks = item.path.parent.name == "releasing"
        return 1 if item.get_closest_marker("xdist_group") else 0 if walks else 2

    items.sort(key=turn)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect once; pytest and the interpreter then walk the whole heap ten times more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the commands' embedding cache out of the user's folder, in subprocesses too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def zygotes() -> Iterator[None]:
    """End the interpreters that programs with torch are forked from."""
    yield
    ZYGOTES.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    with (common / "tiny.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:
            write_tiny_model(common / "tiny")
            lock.write("made")
    return common / "tiny" / "model"
