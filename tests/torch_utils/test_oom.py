"""Memory errors: recognised in every shape, and nothing that only looks like one."""

from __future__ import annotations

import errno
import sys
import traceback

import pytest
import torch

from torch_utils import SafePyTorchCleanup, clear_exception_frames, is_out_of_memory


def chained(inner: BaseException, how: str) -> BaseException:
    outer = ValueError("outer")
    if how == "cause":
        outer.__cause__ = inner
    else:
        outer.__context__ = inner
    return outer


SHAPES = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    "cpu allocator": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "MemoryError": MemoryError(),
    "bad_alloc": RuntimeError("std::bad_alloc"),
    "ENOMEM": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "several arguments": RuntimeError("failed", "CUDA out of memory"),
    "cause": chained(MemoryError(), "cause"),
    "context": chained(MemoryError(), "context"),
    "deep": chained(chained(MemoryError(), "context"), "cause"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_recognised(shape: str) -> None:
    """Each of the shapes in which memory runs out."""
    assert is_out_of_memory(SHAPES[shape])


def test_real_error_of_the_cpu_allocator() -> None:
    """What torch really raises on a CPU."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_groups() -> None:
    """Members of groups count, however deep."""
    group = ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [MemoryError()])])
    assert is_out_of_memory(group)
    assert not is_out_of_memory(ExceptionGroup("g", [ValueError("out of memory")]))


LOOK_ALIKES = [
    ValueError("CUDA out of memory"),
    KeyError("out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    RuntimeError("expected memory format"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("memory"),
    TimeoutError("memory"),
    RuntimeError(),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA driver version is insufficient for CUDA runtime version"),
    RuntimeError("Expected all tensors to be on the same device"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("NCCL error: unhandled system error"),
    RuntimeError("Memory mapping is not supported here"),
    RuntimeError("pin_memory thread exited unexpectedly"),
    OSError(errno.ENFILE, "Too many open files in system"),
    IndexError("index 5 is out of bounds: no memory behind it"),
    AssertionError("out of memory"),
    StopIteration("out of memory"),
]


@pytest.mark.parametrize("error", LOOK_ALIKES, ids=repr)
def test_look_alikes(error: BaseException) -> None:
    """What only sounds like it is no memory error."""
    assert not is_out_of_memory(error)


def fail_with_tensor() -> torch.multiprocessing.reductions.StorageWeakRef:
    tensor = torch.ones(1000)
    raise MemoryError(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))


@pytest.mark.parametrize("how", ["plain", "cause", "context", "none", "cycle"])
def test_frames_of_the_whole_chain_are_cleared(how: str) -> None:
    """The tensor of the frame that raised goes, and the traceback prints as before."""
    try:
        try:
            fail_with_tensor()
        except MemoryError as inner:
            storage = inner.args[0]
            if how == "cause":
                raise ValueError("outer") from inner
            if how == "context":
                raise ValueError("outer")
            if how == "none":
                raise ValueError("outer") from None
            if how == "cycle":
                inner.__cause__ = ValueError("outer")
                inner.__cause__.__context__ = inner
            raise
    except (MemoryError, ValueError) as error:
        before = traceback.format_exception(error)
        assert not storage.expired()
        assert clear_exception_frames(error) >= 1
        assert storage.expired()
        assert traceback.format_exception(error) == before


def test_clearing_only_the_top_is_not_enough() -> None:
    """Negative control: the standard library's helper leaves a chained tensor alive."""
    try:
        try:
            fail_with_tensor()
        except MemoryError as inner:
            storage = inner.args[0]
            raise ValueError("outer") from inner
    except ValueError as error:
        traceback.clear_frames(error.__traceback__)
        assert not storage.expired()


def test_scope_clears_frames_after_out_of_memory() -> None:
    """At the end of a scope the failed frames' tensors are gone, and the error goes on."""
    scope = SafePyTorchCleanup()
    with pytest.raises(MemoryError) as caught, scope:
        fail_with_tensor()
    assert caught.value.args[0].expired()
