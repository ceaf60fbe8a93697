"""Tests of the device and memory checks, which never raise."""

import mmap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import assert_clean, run_forked
from tests.support.stand_in_torch import installed, stand_in
from torch_utils import (
    get_device_info,
    get_optimal_device,
    is_cuda_available,
    memory_snapshot,
    safe_cuda_empty_cache,
)


def test_checks_describe_a_cuda_device() -> None:
    with installed(stand_in()):
        assert is_cuda_available() is True
        assert get_optimal_device() == "cuda"
        assert get_optimal_device(force_cpu=True) == "cpu"
        info, snapshot = get_device_info(), memory_snapshot()
    assert (info["backend"], info["device_count"], info["current_device"]) == ("cuda", 2, 0)
    assert info["device_name"] == "stand-in 0"
    assert list(info["memory"]) == ["cuda:0"]
    assert info["memory"]["cuda:0"]["reserved_bytes"] == 20
    assert snapshot.devices["cuda:0"].free_bytes == 70
    assert (snapshot - snapshot).devices["cuda:0"].free_bytes == 0


@pytest.mark.parametrize("is_capturing", [False, True])
def test_empty_cache_visits_only_devices_in_use_without_a_capture(is_capturing: bool) -> None:
    with installed(stand_in()) as fake:
        fake.cuda.is_current_stream_capturing = lambda: (
            is_capturing and fake.visited[-1] == "enter 0"
        )
        assert safe_cuda_empty_cache() is not is_capturing
    asked = ["enter 0", "exit 0"]
    assert fake.visited == (asked if is_capturing else [*asked, "enter 0", "empty", "exit 0"])


@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_cuda_is_unavailable_in_forked_child_after_use(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", variable)
    with installed(stand_in(_is_in_bad_fork=lambda: False)):
        assert (is_cuda_available(), get_optimal_device()) == (True, "cuda")
    with installed(stand_in(_is_in_bad_fork=lambda: True, is_initialized=lambda: False)):
        assert (is_cuda_available(), get_optimal_device()) == (False, "cpu")
        info = get_device_info()
    assert (info["cuda_available"], info["backend"], info["memory"]) == (False, "cpu", {})
    assert (info["device_count"], info["current_device"]) == (0, None)


def raising(*args: object) -> Any:
    raise RuntimeError("driver trouble")


def torch_with(cuda: Any, **more: Any) -> Any:
    return types.SimpleNamespace(cuda=cuda, __version__="0", **more)


BROKEN = {
    "missing": None,
    "half-imported": torch_with(None, __spec__=types.SimpleNamespace(_initializing=True)),
    "without cuda": torch_with(None),
    "raising": torch_with(types.SimpleNamespace(is_available=raising, is_initialized=raising)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_torch_has_no_device_and_raises_nothing(kind: str) -> None:
    with installed(BROKEN[kind]):
        assert is_cuda_available() is False
        assert get_optimal_device() == "cpu"
        assert safe_cuda_empty_cache() is False
        assert not get_device_info()["cuda_available"]
        assert memory_snapshot().devices == {}


def test_checks_do_not_raise_if_a_device_fails() -> None:
    with installed(stand_in(mem_get_info=raising, device=raising, get_device_name=raising)):
        assert is_cuda_available() is True
        assert get_optimal_device() == "cuda"
        assert get_device_info()["cuda_available"] is True
        assert safe_cuda_empty_cache() is False
        assert memory_snapshot().devices == {}


def test_checks_agree_with_torch_and_refuse_a_device_name() -> None:
    assert is_cuda_available() == torch.cuda.is_available()
    info = get_device_info()
    assert info["torch_version"] == torch.__version__
    assert info["backend"] == get_optimal_device()
    with pytest.raises(TypeError, match="force_cpu must be True or False, got"):
        get_optimal_device("cuda")  # type: ignore[arg-type]


def test_xpu_and_mps_are_found_without_cuda() -> None:
    with installed(stand_in(device_count=lambda: 0, is_initialized=lambda: False)) as fake:
        fake.xpu = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
        assert get_optimal_device() == "xpu"
        del fake.xpu
        fake.backends.mps.is_available = lambda: True
        fake.mps = types.SimpleNamespace(
            driver_allocated_memory=lambda: 50,
            current_allocated_memory=lambda: 40,
            recommended_max_memory=lambda: 100,
        )
        assert get_optimal_device() == "mps"
        assert memory_snapshot().devices["mps:0"].reserved_bytes == 50


def test_host_memory_agrees_with_proc_status() -> None:
    # Not by malloc, which may give what was resident before.
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(bytes(64 << 20))
        before = memory_snapshot()
        lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    for mine, name in ((before.host.rss_bytes, "VmRSS"), (before.host.anonymous_bytes, "RssAnon")):
        assert mine == pytest.approx(int(status[name].split()[0]) * 1024, rel=0.05)
    freed = before - memory_snapshot()
    assert freed.host.anonymous_bytes == pytest.approx(64 << 20, rel=0.1)


# What NVML tells about cards that the program does not use yet

NVML = """
import ctypes, os, torch

class Nvml:  # Two cards, as the library describes them; the second is the first visible one.
    newest, failing = 13000, ()

    def nvmlInit_v2(self):
        return 0
    def nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = self.newest
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = number.value + 1
        return number.value in self.failing

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = f"Card {handle.value - 1}".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, sizes):
        sizes[:] = 1000, 600 + handle.value - 1, 400
        return 0

load, nvml = ctypes.CDLL, Nvml()
ctypes.CDLL = lambda name, *rest, **options: nvml if "nvidia-ml" in str(name) else load(name)
torch.version.cuda = "13.0"
torch.cuda.device_count = lambda: 2
torch.cuda._get_nvml_device_index = lambda index: 1 - index
torch.cuda.is_initialized = lambda: False
for name in ("empty_cache", "device", "mem_get_info", "memory_reserved", "current_device"):
    setattr(torch.cuda, name, lambda *arguments: os._exit(7))  # This would create a context.

from torch_utils import *
info = get_device_info()
assert (info["device_name"], info["current_device"]) == ("Card 1", None), info
unused = {"allocated_bytes": 0, "reserved_bytes": 0, "total_bytes": 1000}
assert info["memory"] == {
    "cuda:0": {**unused, "free_bytes": 601}, "cuda:1": {**unused, "free_bytes": 600}
}, info
assert is_cuda_available()
assert safe_cuda_empty_cache() is False

torch.cuda.mem_get_info = None
torch.cuda.is_initialized = lambda: True
torch._C._cuda_hasPrimaryContext = lambda index: index == 0
assert [*memory_snapshot().devices] == ["cuda:1"]  # torch does not answer for the other one.
torch.cuda.is_initialized = lambda: False

nvml.failing = (0,)
info = get_device_info()
assert (info["device_name"], info["memory"]) == ("cuda", {}), info
nvml.newest = 12080  # The driver is too old.
assert not is_cuda_available()
assert get_device_info()["backend"] == "cpu"
"""


def test_nvml_describes_cards_without_a_context_and_its_trouble_raises_nothing() -> None:
    assert_clean(run_forked(NVML, quick_end=True))
