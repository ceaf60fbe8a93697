"""Memory of a released tensor that others still use stays intact."""

from typing import Any

import pytest
import torch

from torch_utils import release, safe_cuda_empty_cache


def overwrite(device: Any, nbytes: int) -> None:
    """Overwrite the free blocks of this size; memory that was freed too early changes."""
    made = [device.tensor(nbytes, -1.0) for _ in range(8)]
    device.synchronize()
    release(made)


def test_dlpack_consumers_and_unopened_capsules_keep_their_memory(device: Any) -> None:
    before, nbytes = device.reserved_bytes(), device.large_bytes // 8
    tensors = [device.tensor(nbytes) for _ in range(2)]
    consumer, capsule = torch.from_dlpack(tensors[0]), torch.utils.dlpack.to_dlpack(tensors[1])
    report = release(tensors, thorough=True)
    assert sum(held.nbytes for held in report.still_held) == 2 * nbytes, report
    overwrite(device, nbytes)
    other = torch.from_dlpack(capsule)
    assert device.holds(consumer, 1) and device.holds(other, 1)
    del consumer, capsule, other
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


def test_arrays_of_other_libraries_keep_memory(device: Any) -> None:
    """The array is CuPy's on a GPU, and numpy's in host memory."""
    is_on_gpu = device.name == "cuda"
    tensor = device.tensor(device.large_bytes // 8)
    array = pytest.importorskip("cupy").from_dlpack(tensor) if is_on_gpu else tensor.numpy()
    release(tensor)
    overwrite(device, device.large_bytes // 8)
    assert bool((array == 1).all())


def test_views_and_autograd_graphs_keep_memory(device: Any) -> None:
    tensor, leaf, factor = (device.tensor(device.large_bytes // 8) for _ in range(3))
    view = tensor[1::2]
    leaf.requires_grad_()
    product = (leaf * factor.mul_(3)).sum()
    release(tensor, factor)
    overwrite(device, device.large_bytes // 8)
    assert bool((view == 1).all())
    product.backward()
    assert bool((leaf.grad == 3).all())


def test_recorded_stream_reads_released_tensor(device: Any) -> None:
    """`record_stream` keeps the memory until the other stream has read it."""
    tensor, result = device.tensor(device.large_bytes), device.tensor(device.large_bytes).zero_()
    with device.other_stream() as stream:
        if stream is not None:
            tensor.record_stream(stream)
        device.keep_busy()
        result.copy_(tensor)
    release(tensor, thorough=True)
    overwrite(device, device.large_bytes)
    device.synchronize()
    assert device.holds(result, 1)


def test_pending_copy_to_device_survives_release(device: Any) -> None:
    """Page-locked memory is reused only after the copies from it."""
    source, result = device.pinned(device.large_bytes), device.tensor(device.large_bytes).zero_()
    device.keep_busy()
    result.copy_(source, non_blocking=True)
    release(source, thorough=True)
    again = [device.pinned(device.large_bytes).fill_(-1) for _ in range(2)]
    device.synchronize()
    assert device.holds(result, 1)
    release(again)


def test_cuda_graph_keeps_its_workspace_and_its_pool(device: Any) -> None:
    """``thorough=True`` does not clear the workspace, and a released output stays in the pool."""
    weight = torch.eye(1024, device=device.torch_name) * 2
    inputs = torch.ones(1024, 1024, device=device.torch_name)
    total = torch.zeros(1, device=device.torch_name)

    def work() -> Any:
        between = inputs @ weight  # It is in the pool; no variable holds it afterwards.
        total.add_(between.sum())
        return between + 1

    with torch.no_grad():
        graph, outputs = device.capture(work)
    release(device.tensor(device.large_bytes), thorough=True)
    overwrite(device, device.large_bytes // 2)
    for value in (1.0, 3.0):
        inputs.fill_(value)
        graph.replay()
        device.synchronize()
        assert bool((outputs == 2 * value + 1).all())
    if device.name == "cuda":  # A rehearsal has no pool to write to.
        release(outputs)
    overwrite(device, 4 << 20)
    total.zero_()
    graph.replay()
    device.synchronize()
    assert total.item() == 6 * 1024 * 1024


def test_release_during_capture_keeps_the_capture_valid(device: Any) -> None:
    """The capturing thread empties no caches, not even of page-locked memory."""
    inputs = torch.ones(256, 256, device=device.torch_name)
    pinned = [device.pinned(device.large_bytes) for _ in range(2)]

    def work() -> Any:
        between = inputs * 2
        result = between + 1
        for report in (release(between), release(pinned.pop(), thorough=True)):
            assert report.errors == ()
        return result

    with torch.no_grad():
        graph, outputs = device.capture(work)
    inputs.fill_(4)
    graph.replay()
    device.synchronize()
    assert bool((outputs == 9).all())
