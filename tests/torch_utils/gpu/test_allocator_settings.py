"""Releases under other settings of torch's allocators, and of page-locked host memory."""

from typing import Any

import pytest

SCOPE = """
from torch_utils import SafePyTorchCleanup, is_out_of_memory
device.settle()
before = device.reserved_bytes()
for fails in (False, True):
    try:
        with SafePyTorchCleanup(thorough=True) as scope:
            model = scope.manage(device.model())
            assert device.reserved_bytes() - before > 0.9 * device.model_bytes
            device.watch(scope.manage(model(device.inputs(model))))
            if fails:
                device.take(2 * device.capacity_bytes())
    except Exception as error:
        assert fails and is_out_of_memory(error), error
    held = device.reserved_bytes() - before
    assert held == 0, f"{held} bytes: {scope.report}"
taken = device.take(int(0.95 * device.capacity_bytes()))
"""
PINNED = """
from torch_utils import release
device.settle()
before = device.pinned_bytes()
source = device.pinned(device.model_bytes // 4)
there = device.pinned_bytes() - before
assert there >= device.model_bytes // 4, there
del source
device.synchronize()
kept = device.pinned_bytes() - before
assert (kept > 0) == (device.name == "cuda"), f"the control: {kept}"
source = device.pinned(device.model_bytes // 4)
copy = device.tensor(device.model_bytes // 4)
device.keep_busy()
copy.copy_(source, non_blocking=True)
kept = source
report = release(source, thorough=True)  # The queued copy still needs the memory.
device.synchronize()
assert device.holds(copy, 1)
assert kept.numel() == 0
release(thorough=True)
held = device.pinned_bytes() - before
assert held == 0, f"{held} bytes: {report}"
"""


def settings(value: str) -> dict[str, str]:
    """Return the environment for allocator settings; torch 2.9 renamed the variable."""
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    name = "PYTORCH_ALLOC_CONF" if (major, minor) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    return {name: value}


@pytest.mark.alone
def test_expandable_segments_are_unmapped(device: Any) -> None:
    """The program fills the card, so it runs alone."""
    device.assert_clean(device.run(SCOPE, env=settings("expandable_segments:True")))


def test_thorough_release_empties_pinned_cache(device: Any) -> None:
    device.assert_clean(device.run(PINNED))


def test_thorough_release_empties_registered_pinned_cache(device: Any) -> None:
    device.assert_clean(device.run(PINNED, env=settings("pinned_use_cuda_host_register:True")))
