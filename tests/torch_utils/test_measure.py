"""Tests of measure on the CPU, and on other devices with a stand-in."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="func-returns-value"

import mmap
import time
from typing import Any
from unittest.mock import Mock, call

import pytest

from tests.support.stand_in_torch import installed
from torch_utils import Measurement, measure, measuring


def fresh(size: int) -> mmap.mmap:
    """Return pages fresh from the system; malloc may reuse resident ones."""
    pages = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    return pages


def test_each_repetition_is_timed() -> None:
    calls: list[int] = []
    result = measure(lambda n: (calls.append(n), time.sleep(0.01)), 7, warmup=2, repeat=3)
    assert calls == [7] * 5
    assert len(result.host_s) == len(result.device_s) == 3
    assert result.median_s >= 0.01
    assert result.percentile_s(0) <= result.median_s <= result.percentile_s(100)
    assert "ms on cpu (median of 3" in str(result)


def test_peak_includes_memory_that_stays_or_was_freed() -> None:
    fresh(80 << 20).close()
    with measuring() as freed:
        fresh(30 << 20).close()
    assert 25 << 20 < freed.peak_bytes < 60 << 20
    with measuring() as result:
        kept = fresh(30 << 20)
    assert result.peak_bytes > 25 << 20
    kept.close()


def test_cuda_time_comes_from_events() -> None:
    cuda = Mock()
    cuda.current_device.return_value = 1
    cuda.max_memory_allocated.return_value = 123
    cuda.Event.return_value.elapsed_time.return_value = 250.0
    with installed(Mock(cuda=cuda)):
        result = measure(cuda.launch, warmup=0, repeat=1)
    seen = [name for name, _, _ in cuda.mock_calls if name not in ("Event", "current_stream")]
    asked, record = ["is_initialized", "current_device"], "Event().record"
    start = [*asked, "synchronize", "reset_peak_memory_stats", record]
    assert seen[:8] == [*start, "launch", record, "synchronize"]
    cuda.Event.assert_called_with(enable_timing=True)
    assert cuda.synchronize.call_args == cuda.current_stream.call_args == call("cuda:1")
    assert result.device_s == [0.25]
    assert result.host_s[0] != 0.25
    assert (result.peak_bytes, result.device) == (123, "cuda:1")


def test_other_devices_are_synchronised() -> None:
    xpu = Mock(spec=["synchronize", "reset_peak_memory_stats", "max_memory_allocated", "launch"])
    xpu.max_memory_allocated.return_value = 7
    with installed(Mock(xpu=xpu)), measuring("xpu:0") as result:
        xpu.launch("xpu:0")
    order = ["synchronize", "reset_peak_memory_stats", "launch", "synchronize"]
    assert xpu.mock_calls[:4] == [getattr(call, name)("xpu:0") for name in order]
    assert (result.peak_bytes, result.device) == (7, "xpu:0")


def test_wrong_arguments_of_measure_and_incomplete_measurements_are_refused() -> None:
    with pytest.raises(TypeError, match="pass it without calling it"):
        measure(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeat >= 1"):
        measure(int, repeat=0)
    with pytest.raises(ValueError, match="between 0 and 100"):
        Measurement(device_s=[1.0]).percentile_s(101)
    for device in ("cdua", 5):
        with pytest.raises(ValueError, match=f"cannot measure on device '{device}'"):
            measure(sum, [1], device=device)
    with pytest.raises(ValueError, match="nothing measured yet on cpu"):
        _ = Measurement().median_s
    with installed(None):
        with pytest.raises(ValueError, match="import torch first"), measuring("cuda"):
            pass
        with measuring("cpu") as result:
            assert "nothing measured yet" in str(result)
    assert "ms on" in str(result)


def test_what_has_to_be_awaited_is_not_measured() -> None:
    async def embed() -> None: ...

    def batches() -> Any:
        yield

    for function in (embed, batches):
        for warmup in (0, 1):
            with pytest.raises(TypeError, match=r"\(\) has to be awaited or iterated"):
                measure(function, warmup=warmup, repeat=1)
