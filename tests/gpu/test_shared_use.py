"""What somebody else still uses of a released tensor stays whole until they have done."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import SkipTest

from torch_utils import release, safe_cuda_empty_cache


def overwrite(device: Any, nbytes: int) -> None:
    """Take all that is free of such blocks, and write to it: what was freed too soon shows."""
    made = [device.tensor(nbytes, -1.0) for _ in range(8)]
    device.synchronize()
    release(made)


def test_dlpack_keeps_its_memory(device: Any) -> None:
    """A consumer that shares the memory has it after the tensor was released."""
    import torch

    before = device.reserved_bytes()
    tensor = device.tensor(device.large_bytes // 8)
    consumer = torch.from_dlpack(tensor)
    report = release(tensor, thorough=True)
    assert tensor.numel() == 0
    assert sum(held.nbytes for held in report.still_held) == device.large_bytes // 8, report
    overwrite(device, device.large_bytes // 8)
    assert device.holds(consumer, 1)
    del consumer
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


def test_a_capsule_that_waits_keeps_its_memory(device: Any) -> None:
    """A capsule that nobody has opened yet does, too."""
    import torch

    tensor = device.tensor(device.large_bytes // 8)
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    release(tensor)
    overwrite(device, device.large_bytes // 8)
    assert device.holds(torch.from_dlpack(capsule), 1)


def test_another_library_keeps_its_memory(device: Any) -> None:
    """CuPy's array on a GPU, numpy's in host memory."""
    tensor = device.tensor(device.large_bytes // 8)
    array = _cupy().from_dlpack(tensor) if device.name == "cuda" else tensor.numpy()
    release(tensor)
    overwrite(device, device.large_bytes // 8)
    assert bool((array == 1).all())


def _cupy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import cupy
        except ImportError:
            raise SkipTest("needs cupy") from None
    return cupy


def test_views_and_graphs_keep_their_memory(device: Any) -> None:
    """A view, and what the backward pass needs."""
    tensor = device.tensor(device.large_bytes // 8)
    view = tensor[1::2]
    leaf = device.tensor(device.large_bytes // 8).requires_grad_()
    factor = device.tensor(device.large_bytes // 8).mul_(3)
    product = (leaf * factor).sum()
    release(tensor, factor)
    overwrite(device, device.large_bytes // 8)
    assert bool((view == 1).all())
    product.backward()
    assert bool((leaf.grad == 3).all())


def test_another_stream_reads_to_the_end(device: Any) -> None:
    """A tensor that was lent to a stream stays until the stream has done, caches emptied or not."""
    tensor, result = device.tensor(device.large_bytes), device.tensor(device.large_bytes).zero_()
    with device.other_stream() as stream:
        device.lend(tensor, stream)
        device.keep_busy()
        result.copy_(tensor)
    release(tensor, thorough=True)
    overwrite(device, device.large_bytes)
    device.synchronize()
    assert device.holds(result, 1)


def test_the_same_stream_reads_to_the_end(device: Any) -> None:
    """Work that is queued on the tensor's own stream comes before the next user of the memory."""
    tensor, result = device.tensor(device.large_bytes), device.tensor(device.large_bytes).zero_()
    device.keep_busy()
    result.copy_(tensor)
    release(tensor)
    overwrite(device, device.large_bytes)
    assert device.holds(result, 1)


def test_a_pending_copy_to_the_device_arrives(device: Any) -> None:
    """Page-locked memory is handed out again only when the copies from it are done."""
    source, result = device.pinned(device.large_bytes), device.tensor(device.large_bytes).zero_()
    device.keep_busy()
    result.copy_(source, non_blocking=True)
    release(source, thorough=True)
    again = [device.pinned(device.large_bytes).fill_(-1) for _ in range(2)]
    device.synchronize()
    assert device.holds(result, 1)
    release(again)


def test_a_pending_copy_to_the_host_arrives(device: Any) -> None:
    """The tensor on the device is released while it is still being read."""
    source, result = device.tensor(device.large_bytes), device.pinned(device.large_bytes).zero_()
    device.keep_busy()
    result.copy_(source, non_blocking=True)
    release(source)
    overwrite(device, device.large_bytes)
    device.synchronize()
    assert device.holds(result, 1)


def test_a_cuda_graph_replays_what_it_captured(device: Any) -> None:
    """Released are a tensor beside it, and everything ``thorough`` clears: not its workspace."""
    import torch

    weight = torch.eye(512, device=device.torch_name) * 2
    inputs = torch.ones(512, 512, device=device.torch_name)
    with torch.no_grad():
        graph, outputs = device.capture(lambda: inputs @ weight)
    release(device.tensor(device.large_bytes), thorough=True)
    overwrite(device, device.large_bytes // 2)
    for value in (1.0, 5.0):
        inputs.fill_(value)
        graph.replay()
        device.synchronize()
        assert bool((outputs == 2 * value).all())
    graph.reset()


def test_a_cuda_graph_keeps_what_it_writes_to(device: Any) -> None:
    """The graph's own pool is not given to others when its output tensor is released."""
    import torch

    inputs = torch.ones(1024, 1024, device=device.torch_name)
    total = torch.zeros(1, device=device.torch_name)

    def work() -> Any:
        between = inputs * 2  # Lives in the graph's pool; nobody names it afterwards.
        total.add_(between.sum())
        return between + 1

    with torch.no_grad():
        graph, outputs = device.capture(work)
    total.zero_()
    kept = outputs if device.name == "cuda" else None  # A rehearsal has no pool to write to.
    if kept is not None:
        release(kept)
    overwrite(device, 4 << 20)
    graph.replay()
    device.synchronize()
    assert total.item() == 2 * 1024 * 1024
    graph.reset()


def test_release_during_a_capture_spoils_nothing(device: Any) -> None:
    """Caches, of page-locked memory too, are not emptied by the thread that captures."""
    import torch

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
    graph.reset()
