"""Releases under other settings of torch's allocators, and of page-locked host memory."""

from typing import Any

import pytest
import torch

SCOPE = """
from torch_utils import SafePyTorchCleanup
device.settle()
before = device.reserved_bytes()
with SafePyTorchCleanup(thorough=True) as scope:
    model = scope.manage(device.model())
    assert device.reserved_bytes() - before > 0.9 * device.model_bytes
    device.watch(scope.manage(model(device.inputs(model))))
held = device.reserved_bytes() - before
assert held == 0, f"{held} bytes: {scope.report}"
taken = device.take(int(0.95 * device.capacity_bytes()))
"""
PINNED = """
from torch_utils import release
device.settle()
nbytes, before = device.model_bytes // 4, device.pinned_bytes()
source = device.pinned(nbytes)
assert device.pinned_bytes() - before >= nbytes
del source
kept = device.pinned_bytes() - before
assert (kept > 0) == (device.name == "cuda"), f"the control: {kept}"
source = device.pinned(nbytes)
copy = device.tensor(nbytes)
device.keep_busy()
copy.copy_(source, non_blocking=True)
report = release(source, thorough=True)  # The queued copy still needs the memory.
device.synchronize()
assert device.holds(copy, 1)
release(thorough=True)
held = device.pinned_bytes() - before
assert held == 0, f"{held} bytes: {report}"
"""


def settings(value: str) -> dict[str, str]:
    """Return the environment for allocator settings; torch 2.9 renamed the variable."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return {"PYTORCH_ALLOC_CONF" if version >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF": value}


@pytest.mark.alone
def test_expandable_segments_are_unmapped(device: Any) -> None:
    """The program fills the card, so it runs alone."""
    device.assert_clean(device.run(SCOPE, env=settings("expandable_segments:True")))


def test_thorough_release_empties_pinned_cache(device: Any) -> None:
    device.assert_clean(device.run(PINNED))


def test_thorough_release_empties_registered_pinned_cache(device: Any) -> None:
    device.assert_clean(device.run(PINNED, env=settings("pinned_use_cuda_host_register:True")))
