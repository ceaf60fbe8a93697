"""Run each test of this folder twice: as a rehearsal, and on a GPU if there is one."""

import importlib.util
import json
import os
from typing import Any

import pytest

from tests.torch_utils.gpu.device import Cuda, Rehearsal


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take a device with both."""
    if "device" not in metafunc.fixturenames:
        return
    marks = [pytest.mark.gpu]
    if importlib.util.find_spec("xdist") is not None:  # Without xdist the marker does not exist.
        marks.append(pytest.mark.xdist_group("gpu"))
    kind = Cuda
    if "CUDA_STAND_IN" in os.environ:
        from tests.torch_utils.gpu.stand_in.device import StandIn as kind
    real = pytest.param(kind, id="cuda", marks=marks)
    rehearsal = pytest.param(Rehearsal, id="rehearsal", marks=pytest.mark.slow)
    metafunc.parametrize("device", [rehearsal, real], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("torch")
    kind = request.param
    why_not = kind.skipped.get(request.node.originalname) or kind.skipped.get(request.path.stem)
    if why_not or (why_not := kind.why_not()):
        pytest.skip(why_not)
    made = kind()
    if made.name == "cuda":  # A rehearsal counts only the tensors that it watches.
        made.settle()
    return made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome of each test to the journal of `run.py`."""
    if "GPU_JOURNAL" in os.environ and (report.when == "call" or not report.passed):
        reason = report.longreprtext if report.failed else ""
        if isinstance(report.longrepr, tuple):  # The file and the line of a skip, and its reason.
            reason = report.longrepr[2].removeprefix("Skipped: ")
        entry = {"test": report.nodeid, "outcome": report.outcome, "reason": reason}
        entry["seconds"] = str(round(report.duration, 1))
        with open(os.environ["GPU_JOURNAL"], "a") as file:
            file.write(json.dumps(entry) + "\n")
