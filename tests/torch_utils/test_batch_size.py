"""Tests of find_batch_size."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, call-arg, func-returns-value, misc"

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.releasing import without_collector
from tests.support.stand_in_torch import installed, stand_in
from torch_utils import find_batch_size, is_out_of_memory

pytestmark = pytest.mark.usefixtures("frozen_heap")


def out_of_memory() -> None:
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
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"))


def test_bare_decorator_starts_at_128_and_a_function_gives_smaller_sizes() -> None:
    @find_batch_size
    def first(batch_size: int) -> int:
        return batch_size

    assert first() == 128
    for sizes in ([100, 7], [128]):
        remaining = iter(sizes)

        @find_batch_size(reduce_batch_size_fn=lambda: next(remaining))
        def second(batch_size: int) -> int:
            return batch_size if batch_size < 100 else out_of_memory()  # type: ignore[return-value]

        if sizes == [100, 7]:
            assert second() == 7
        else:
            with pytest.raises(ValueError, match="must return less than 128"):
                second()


def test_batch_size_in_the_call_is_refused() -> None:
    @find_batch_size
    def work(batch_size: int, text: str) -> None: ...

    for arguments in ((32, "text"), ()):
        with pytest.raises(TypeError, match=r"passes the batch size .* of .*work"):
            work(*arguments)


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


def test_invalid_sizes_and_factors_are_refused_when_decorating() -> None:
    for factor in (0, 1, -1, 2):
        with pytest.raises(ValueError, match="factor must be between 0 and 1"):
            find_batch_size(factor=factor)
    wrong: list[Any] = ["a", 2.5, -1, True]
    for size in wrong:
        with pytest.raises(ValueError, match="starting_batch_size must be"):
            find_batch_size(starting_batch_size=size)(len)
    with pytest.raises(TypeError, match="starting_batch_size="):
        find_batch_size(5)  # type: ignore[call-overload]


# What it decorates


def test_coroutine_functions_are_awaited() -> None:
    """The tensor of a failed try, in a coroutine's frame, is freed."""
    storages: list[StorageWeakRef] = []
    gone: list[bool] = []

    async def compute(batch_size: int) -> None:
        tensor = torch.ones(100 * batch_size)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        await asyncio.sleep(0)
        if batch_size > 2:
            out_of_memory()

    @find_batch_size(starting_batch_size=8)
    async def work(batch_size: int, text: str) -> str:
        """Say it."""
        gone.extend(storage.expired() for storage in storages[-1:])
        await compute(batch_size)
        return f"{text} {batch_size}"

    async def main() -> None:
        assert await work("x") == "x 2"
        assert gone == [True, True]
        assert await work("y") == "y 2"
        assert await find_batch_size(functools.partial(work.__wrapped__, text="z"), 4)() == "z 2"  # type: ignore[attr-defined]

    assert work.__doc__ == "Say it."
    asyncio.run(main())


def numbers(batch_size: int) -> Iterator[int]:
    yield batch_size


async def stream(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


def test_generator_functions_are_refused() -> None:
    functions: list[Callable[..., Any]] = [numbers, stream, functools.partial(numbers)]
    for function in functions:
        for decorate in (find_batch_size, find_batch_size(starting_batch_size=4)):
            with pytest.raises(TypeError, match="returns its whole result"):
                decorate(function)


def test_method_is_refused() -> None:
    """Its first argument is the object, not the batch size."""

    class Trainer:
        def train(self, batch_size: int) -> int:
            return batch_size

        @staticmethod
        def fit(batch_size: int) -> int:
            return batch_size

    with pytest.raises(TypeError, match=r"batch size as self of .*Trainer.train\(\)"):
        find_batch_size(Trainer.train)
    assert find_batch_size(Trainer().train)() == find_batch_size(Trainer.fit)() == 128
