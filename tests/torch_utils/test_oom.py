"""Tests of out-of-memory errors and of their frames."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, name-defined"

import errno
import sys
import traceback
from typing import Any

import pytest
import torch

from tests.support.other_pythons import other_pythons
from tests.support.programs import assert_clean, run
from tests.support.releasing import gone, weak, without_collector
from torch_utils import SafePyTorchCleanup, clear_exception_frames, is_out_of_memory

CHAINED = ValueError("outer")
CHAINED.__cause__ = ValueError("cause")
CHAINED.__cause__.__context__ = MemoryError()
SHAPES: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    MemoryError(),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("unable to mmap 4000 bytes from file </torch_1_2_3>: Cannot allocate memory (12)"),
    RuntimeError("failed", "CUDA out of memory"),
    CHAINED,
    ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [MemoryError()])]),
]
LOOK_ALIKES: list[BaseException] = [
    ValueError("CUDA out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("unable to mmap 4 bytes from file </torch_1_2>: Permission denied (13)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ExceptionGroup("g", [ValueError("out of memory")]),
]


def test_memory_errors_are_recognised_and_look_alikes_are_not() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (*SHAPES, caught.value):
        assert is_out_of_memory(error), error
    for error in LOOK_ALIKES:
        assert not is_out_of_memory(error), error


def fail_with_tensor() -> torch.multiprocessing.reductions.StorageWeakRef:
    tensor = torch.ones(1000)
    raise MemoryError(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))


@pytest.mark.parametrize("link", ["__cause__", "__context__", "exceptions"])
def test_frames_of_chained_exceptions_are_cleared(link: str) -> None:
    """Also of those that refer to each other."""
    try:
        fail_with_tensor()
    except MemoryError as error:
        inner = error
    outer = ExceptionGroup("outer", [inner if link == "exceptions" else ValueError("member")])
    if link != "exceptions":
        setattr(outer, link, inner)
    inner.__context__ = outer
    before = traceback.format_exception(outer)
    assert not inner.args[0].expired()
    assert clear_exception_frames(outer) == 1
    assert inner.args[0].expired()
    assert traceback.format_exception(outer) == before


def test_scope_clears_frames_and_collects_cycles_after_out_of_memory() -> None:
    cycle: list[Any] = [torch.ones(64)]
    storages = weak(*cycle)
    with without_collector(), pytest.raises(MemoryError) as caught, SafePyTorchCleanup() as scope:
        scope.manage(torch.ones(1))
        cycle.append(cycle)
        del cycle
        fail_with_tensor()
    assert gone([*storages, caught.value.args[0]])


# Runs on every Python that is found; none of it needs torch.
SURVIVORS = """
import asyncio, weakref
from torch_utils import clear_exception_frames

class Big: pass
def fail():
    big = Big()
    references.append(weakref.ref(big))
    raise MemoryError

def numbers():
    kept = "kept"
    try:
        fail()
    except MemoryError as error:
        caught.append(error)
    yield kept
    yield kept * 2

references, caught = [], []
generator = numbers()
assert next(generator) == "kept"
assert clear_exception_frames(caught.pop()) >= 1
assert references.pop()() is None
assert list(generator) == ["keptkept"], "the generator is dead"

# What has ended by the exception lets go of everything, generators and coroutines too.
def ending():
    big = Big()
    references.append(weakref.ref(big))
    yield
    fail()

async def awaiting():
    for _ in ending():
        await asyncio.sleep(0)

for run in (lambda: list(ending()), lambda: asyncio.run(awaiting())):
    references.clear()
    try:
        run()
    except MemoryError as error:
        assert references[0]() is not None
        clear_exception_frames(error)
        assert [reference() for reference in references] == [None, None]
"""


@pytest.mark.parametrize(
    "version", ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
)
def test_frames_of_live_generators_are_kept(version: str) -> None:
    assert_clean(run(SURVIVORS, python={"this": sys.executable, **other_pythons()}[version]))


def test_clear_exception_frames_clears_closures() -> None:
    """A cleared frame keeps its function, and that its closure."""

    def fail(data: torch.Tensor) -> None:
        storages.extend(weak(data))
        max(data.sum() / number.missing for number in [1])

    storages: list[Any] = []
    with pytest.raises(AttributeError) as caught:
        fail(torch.ones(10))
    assert not gone(storages)
    clear_exception_frames(caught.value)
    assert gone(storages)
