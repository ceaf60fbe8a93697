"""The same under other settings of torch's allocators, and for page-locked host memory."""

from __future__ import annotations

from typing import Any

from gpu.device import slow_rehearsal

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
copy = device.tensor(device.model_bytes // 4)
device.keep_busy()
copy.copy_(source, non_blocking=True)
kept = source
report = release(source, thorough=True)  # While the copy waits: its memory is not free yet.
device.synchronize()
assert device.holds(copy, 1)
assert kept.numel() == 0
release(thorough=True)
held = device.pinned_bytes() - before
assert held == 0, f"{held} bytes: {report}"
"""


def settings(value: str) -> dict[str, str]:
    """torch 2.9 has the first name, and warns about the second."""
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    name = "PYTORCH_ALLOC_CONF" if (major, minor) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    return {name: value}


def test_usual_settings(device: Any) -> None:
    """What the others are compared with."""
    device.assert_clean(device.run(SCOPE))


@slow_rehearsal
def test_expandable_segments(device: Any) -> None:
    """Segments that grow are unmapped."""
    device.assert_clean(device.run(SCOPE, env=settings("expandable_segments:True")))


@slow_rehearsal
def test_pinned_memory(device: Any) -> None:
    """The cache of page-locked memory is emptied by ``thorough=True``, never under a copy."""
    device.assert_clean(device.run(PINNED))


@slow_rehearsal
def test_pinned_memory_that_is_registered(device: Any) -> None:
    """Memory that was allocated and then page-locked goes the same way."""
    device.assert_clean(device.run(PINNED, env=settings("pinned_use_cuda_host_register:True")))


@slow_rehearsal
def test_pinned_memory_stays_in_the_cache(device: Any) -> None:
    """The control: deleted, it stays in torch's cache, as far as there is one."""
    device.assert_clean(
        device.run("""
        device.settle()
        before = device.pinned_bytes()
        source = device.pinned(device.model_bytes // 4)
        assert device.pinned_bytes() - before >= device.model_bytes // 4
        del source
        device.synchronize()
        kept = device.pinned_bytes() - before
        assert (kept > 0) == (device.name == "cuda"), kept
        """)
    )
