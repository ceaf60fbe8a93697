"""A broken device, memory that runs out at a chosen call, and two devices."""

from typing import Any
from unittest import SkipTest

IMPORTS = """
import sys
import torch
import torch_utils as t
"""


def run_with_faults(device: Any, program: str) -> None:
    """Run a program whose device can fail on demand."""
    if not hasattr(device, "set_fault"):
        raise SkipTest("no device fails on demand but the stand-in")
    device.assert_clean(device.run(IMPORTS + program))


def test_all_memory_is_back_whichever_allocation_fails(device: Any) -> None:
    run_with_faults(
        device,
        """
device.settle()
before, failed = device.reserved_bytes(), 0
for calls in range(1, 30):
    try:
        with t.SafePyTorchCleanup(thorough=True) as scope:
            device.set_fault("out of memory", calls)
            model = scope.manage(device.model())
            optimizer = scope.manage(torch.optim.SGD(model.parameters(), momentum=0.9))
            model(device.inputs(model)).mean().backward()
            optimizer.step()
    except RuntimeError as error:
        assert t.is_out_of_memory(error), error
        failed += 1
    else:
        break
    finally:
        device.set_fault("")
    assert device.reserved_bytes() == before, (calls, scope.report)
assert failed >= 8, failed
assert device.reserved_bytes() == before
""",
    )


def test_checks_and_releases_survive_a_broken_device(device: Any) -> None:
    """They raise nothing, and the error of the block comes out of it."""
    run_with_faults(
        device,
        """
class Kept(t.Resource):
    def __init__(self):
        self.model = device.model(1 << 20)
    def _release(self):
        t.safe_tensor_cleanup("model", self)

kept, model = Kept(), device.model()
try:
    with t.SafePyTorchCleanup(thorough=True) as scope:
        scope.manage(model)
        device.set_fault("broken device")
        torch.cuda.synchronize()
except RuntimeError as error:
    assert "unspecified launch failure" in str(error), error
else:
    raise AssertionError("the control: the device works")
t.is_cuda_available(), t.get_optimal_device(), t.get_device_info(), t.memory_snapshot()
assert t.safe_cuda_empty_cache() is False and t.memory_snapshot().devices == {}
assert t.release(torch.ones(3)).freed_bytes == {"host": 12}
""",
    )


def test_release_uses_the_device_of_each_tensor(device: Any) -> None:
    """A model on two devices returns both; the current device does not matter."""
    import torch

    if device.name != "cuda" or torch.cuda.device_count() < 2:
        raise SkipTest("needs two CUDA devices")
    device.assert_clean(
        device.run(
            IMPORTS
            + """
MB = 1 << 20
def reserved():
    return [torch.cuda.memory_reserved(number) for number in range(2)]
kept = torch.zeros(MB, device="cuda:0")
before = reserved()
parts = torch.nn.ModuleList(
    torch.nn.Linear(4096, 4096, device=f"cuda:{number}") for number in range(2)
)
assert all(now - then >= 64 * MB for now, then in zip(reserved(), before))
report = t.release(parts)
assert set(report.freed_bytes) == {"cuda:0", "cuda:1"}, report
assert reserved() == before and kept.numel() == MB
assert set(t.memory_snapshot().devices) == {"cuda:0", "cuda:1"}
"""
        )
    )
