"""Tests of find_batch_size."""

# Misuses things on purpose.
# mypy: disable-error-code="arg-type, call-overload, call-arg, misc"

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.releasing import without_collector
from tests.support.stand_in_torch import installed, stand_in
from torch_utils import find_batch_size, is_out_of_memory

pytestmark = pytest.mark.usefixtures("frozen_heap")


def out_of_memory() -> Any:
    raise RuntimeError("CUDA out of memory.")


def test_batch_size_is_halved_or_multiplied_by_a_factor_until_it_fits() -> None:
    tried: list[int] = []

    @find_batch_size(starting_batch_size=16)
    def work(batch_size: int, text: str, end: str = "") -> str:
        tried.append(batch_size)
        if batch_size > 8:
            out_of_memory()
        return text + end

    assert work("x", end="y") == "xy"
    assert tried == [16, 8]

    @find_batch_size(starting_batch_size=10, factor=0.85)
    def slower(batch_size: int) -> int:
        if batch_size > 7:  # cuDNN's workspace may not fit; accelerate repeats such a call too.
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear")
        return batch_size

    assert slower() == 6, "after 10 and 8"
    for call in (functools.partial(slower, 32), work):
        with pytest.raises(TypeError, match=r"passes the batch size .* of .*(work|slower)"):
            call()
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"))


def test_bare_decorator_starts_at_128_and_a_function_gives_smaller_sizes() -> None:
    def work(batch_size: int) -> int:
        return batch_size if batch_size < 100 else out_of_memory()

    assert find_batch_size(lambda batch_size: batch_size)() == 128
    assert find_batch_size(work, reduce_batch_size_fn=iter([100, 7]).__next__)() == 7
    with pytest.raises(ValueError, match="must return less than 128"):
        find_batch_size(work, reduce_batch_size_fn=lambda: 128)()


@pytest.mark.parametrize("start", [0, 2])
def test_error_is_raised_if_no_size_fits(start: int) -> None:
    tried: list[int] = []

    @find_batch_size(starting_batch_size=start)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        out_of_memory()

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero") as e:
        work()
    assert 0 not in tried
    assert (str(e.value.__cause__) == "CUDA out of memory.") is bool(start)


def test_other_errors_are_raised() -> None:
    """Also one that is raised while a memory error is handled."""
    tried: list[int] = []

    @find_batch_size
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        try:
            out_of_memory()
        except RuntimeError:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    assert tried == [128]


def test_failed_try_is_freed_before_caches_are_emptied() -> None:
    """Also what only a reference cycle keeps."""
    alive: list[bool] = []
    storages: list[StorageWeakRef] = []

    @find_batch_size(starting_batch_size=4)
    def work(batch_size: int) -> None:
        tensor = torch.ones(1000 * batch_size)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        cycle: list[Any] = [tensor]
        cycle.append(cycle)
        if batch_size > 1:
            try:
                out_of_memory()
            except RuntimeError as error:
                raise ValueError("while working") from error

    torch.ones(1)  # The first call looks for torch.SymInt in torch 2.4.
    stand_in_torch = stand_in(empty_cache=lambda: alive.append(not storages[-1].expired()))
    with without_collector(), installed(stand_in_torch):
        work()
    assert alive == [False] * 2


def test_coroutine_functions_are_awaited() -> None:
    """The tensor of a failed try, in a coroutine's frame, is freed."""
    storages: list[StorageWeakRef] = []

    async def compute(batch_size: int) -> None:
        tensor = torch.ones(100 * batch_size)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        await asyncio.sleep(0)
        if batch_size > 2:
            out_of_memory()

    async def work(batch_size: int, text: str) -> str:
        """Say it."""
        assert all(storage.expired() for storage in storages)
        await compute(batch_size)
        return f"{text} {batch_size}"

    decorated = find_batch_size(work, 8)
    assert decorated.__doc__ == "Say it."
    partial = find_batch_size(functools.partial(work, text="x"), 4)
    for awaitable in (decorated("x"), partial()):
        assert asyncio.run(awaitable) == "x 2"


def numbers(batch_size: int) -> Iterator[int]:
    yield batch_size


async def stream(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


class Trainer:
    def train(self, batch_size: int) -> int:
        return batch_size


def test_what_cannot_be_called_with_sizes_is_refused_when_decorating() -> None:
    for factor in (0, 1, -1, 2):
        with pytest.raises(ValueError, match="factor must be between 0 and 1"):
            find_batch_size(factor=factor)
    for size in ("a", 2.5, -1, True):
        with pytest.raises(ValueError, match="starting_batch_size must be"):
            find_batch_size(starting_batch_size=size)(len)
    with pytest.raises(TypeError, match="starting_batch_size="):
        find_batch_size(5)
    for function in (numbers, stream, functools.partial(numbers)):
        with pytest.raises(TypeError, match="returns its whole result"):
            find_batch_size(function)
    with pytest.raises(TypeError, match=r"batch size as self of .*Trainer.train\(\)"):
        find_batch_size(Trainer.train)
    assert find_batch_size(Trainer().train)() == 128
