"""Checks and cleanups create no context, by the driver, by torch and by NVML."""

from typing import Any

EVERYTHING = """
import os
import torch
import torch_utils as t
from torch_utils import measure

class Kept(t.Resource):
    def _release(self):
        t.safe_tensor_cleanup("tensor", self)
def everything():
    t.is_cuda_available(), t.get_optimal_device(), t.get_device_info(), t.memory_snapshot()
    t.safe_cuda_empty_cache()
    t.release(torch.nn.Linear(3, 3), torch.ones(3), collect="full", thorough=True)
    with t.SafePyTorchCleanup(thorough=True, restore_flags=True) as scope:
        scope.manage(torch.ones(3))
        scope.manage(Kept()).tensor = torch.ones(3)
    t.is_out_of_memory(MemoryError()), t.clear_exception_frames(MemoryError())
    t.find_batch_size(starting_batch_size=2)(lambda batch_size: None)()
    measure(torch.ones, 3, repeat=2)
"""


def test_checks_and_cleanups_create_no_context(device: Any) -> None:
    """As a control, the same program sees the context of a tensor. Other GPUs still have none."""
    device.assert_clean(
        device.run(
            EVERYTHING
            + """
everything()
assert not device.has_context(), "something has called cuInit"
device.make_context()
assert device.has_context(), "the control: this cannot see a context"
everything()
assert set(t.memory_snapshot().devices) <= {device.torch_name}
assert set(t.get_device_info()["memory"]) <= {device.torch_name}
"""
        )
    )


def test_closing_at_exit_creates_no_context(device: Any) -> None:
    device.assert_clean(
        device.run(
            """
import atexit
def look():
    assert not device.has_context(), "the exit has called cuInit"
    print("looked")
atexit.register(look)  # Before the import of the library, so it runs after its callback.
"""
            + EVERYTHING
            + """
class Late(t.Resource):
    def _release(self):
        everything()
late = Late()
late.model = torch.nn.Linear(3, 3)
"""
        )
    )


def test_forked_child_can_use_cuda_after_checks(device: Any) -> None:
    """The parent has not used the device before the fork."""
    device.assert_clean(
        device.run("""
        import os, sys
        import torch, torch_utils as t
        t.is_cuda_available(), t.get_optimal_device(), t.get_device_info(), t.memory_snapshot()
        child = os.fork()
        if child == 0:
            device.make_context()
            assert device.has_context()
            t.release(device.tensor(1 << 20), thorough=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not device.has_context()
        """)
    )
