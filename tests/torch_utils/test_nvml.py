"""Tests of what NVML tells about cards that the program does not use yet."""

from tests.support.programs import assert_clean, run_forked

PROGRAM = """
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
    assert_clean(run_forked(PROGRAM, quick_end=True))
