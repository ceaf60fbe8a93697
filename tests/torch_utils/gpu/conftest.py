"""Run each test of this folder twice: as a rehearsal, and on a GPU if there is one."""

from __future__ import annotations

import importlib.util

import pytest

from tests.torch_utils.gpu.device import Cuda, Rehearsal


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take a device with both."""
    if "device" not in metafunc.fixturenames:
        return
    marks = [pytest.mark.gpu]
    if importlib.util.find_spec("xdist") is not None:  # Without xdist the marker does not exist.
        marks.append(pytest.mark.xdist_group("gpu"))
    real = pytest.param(Cuda, id="cuda", marks=marks)
    rehearsal = pytest.param(Rehearsal, id="rehearsal", marks=pytest.mark.slow)
    metafunc.parametrize("device", [rehearsal, real], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Cuda | Rehearsal:
    pytest.importorskip("torch")
    if request.param is Cuda and Cuda.why_not() is not None:
        pytest.skip(str(Cuda.why_not()))
    made = request.param()
    if request.param is Cuda:  # A rehearsal counts only the tensors that it watches.
        made.settle()
    return made
