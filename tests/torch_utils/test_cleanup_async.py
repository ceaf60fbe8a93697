"""Scopes of coroutines: what is awaited, cancelled, closed and left to a task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from torch_utils import (
    SafePyTorchCleanup,
    release,
)


def test_decorator_of_coroutines() -> None:
    """Coroutine functions and asynchronous generators, finished, broken off and thrown into."""
    scope = SafePyTorchCleanup()
    tensors: list[torch.Tensor] = []

    @scope
    async def work() -> int:
        tensors.append(scope.manage(torch.ones(5)))
        await asyncio.sleep(0)
        return tensors[-1].numel()

    @scope
    async def numbers() -> Any:
        tensors.append(scope.manage(torch.ones(5)))
        try:
            got = yield 1
        except ValueError:
            got = "caught"
        yield got

    async def main() -> None:
        assert await work() == 5
        assert [n async for n in numbers()] == [1, None]
        generator = numbers()
        assert await generator.asend(None) == 1
        assert await generator.asend("sent") == "sent"
        await generator.aclose()
        thrown = numbers()
        await thrown.asend(None)
        assert await thrown.athrow(ValueError()) == "caught"
        await thrown.aclose()

    asyncio.run(main())
    assert [t.numel() for t in tensors] == [0] * 4


def test_async_with_awaits_and_survives_cancellation() -> None:
    """Coroutine callbacks are awaited; a cancelled block releases everything."""
    order: list[str] = []

    async def closer(name: str) -> None:
        await asyncio.sleep(0)
        order.append(name)

    async def use(tensor: torch.Tensor, started: asyncio.Event) -> None:
        async with SafePyTorchCleanup(tensor) as scope:
            scope.callback(closer, "first")
            scope.callback(closer, "second")
            started.set()
            await asyncio.sleep(100)

    async def main() -> None:
        tensor, started = torch.ones(5), asyncio.Event()
        task = asyncio.create_task(use(tensor, started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tensor.numel() == 0
        assert order == ["second", "first"]

    asyncio.run(main())


def test_coroutine_in_a_plain_with() -> None:
    """What cannot be awaited is an error in the report, and no warning."""

    async def closer() -> None: ...

    with SafePyTorchCleanup() as scope:
        scope.callback(closer)
    assert "use `async with`" in str(scope.report.errors[0])


def test_task_started_in_a_callback_releases_by_itself() -> None:
    """It inherits the context of a release that is over: its own collects all the same."""
    tasks: list[Any] = []

    class Node:
        pass

    async def later() -> bool:
        await asyncio.sleep(0.01)
        model = nn.Linear(2, 2)
        cycle = Node()
        cycle.me, cycle.weight = cycle, model.weight
        del cycle
        return not release(model).still_held

    async def main() -> bool:
        async with SafePyTorchCleanup() as scope:
            scope.callback(lambda: tasks.append(asyncio.create_task(later())))
        return await tasks[0]

    assert asyncio.run(main())


def test_closing_a_coroutine_at_its_end() -> None:
    """The rest is done, in the block and in the middle of the end; what must be awaited cannot."""

    async def endless() -> None:
        try:
            await asyncio.Future()
        finally:
            order.append("left")

    async def never() -> None:
        order.append("awaited")

    async def work(in_block: bool) -> None:
        async with scope:
            scope.manage(tensor)
            scope.callback(order.append, "plain")
            scope.callback(never)
            if in_block:
                await endless()
            scope.callback(endless)

    async def drive() -> None:
        for in_block in (True, False):
            nonlocal tensor
            tensor = torch.ones(5)
            order.clear()
            coroutine = work(in_block)
            coroutine.send(None)
            coroutine.close()
            assert order == ["left", "plain"]
            assert tensor.numel() == 0
            assert "must be awaited" in str(scope.report.errors[0])

    scope, order, tensor = SafePyTorchCleanup(), [], torch.ones(5)
    asyncio.run(drive())


def test_cancelled_twice_at_its_end() -> None:
    """Each cancellation ends what is being awaited, and nothing else."""

    async def main() -> None:
        async def waits(name: str) -> None:
            order.append(name)
            await asyncio.sleep(100)

        async def work() -> None:
            async with SafePyTorchCleanup(tensor) as scope:
                scope.callback(waits, "second")
                scope.callback(waits, "first")

        task = asyncio.create_task(work())
        for _ in range(2):
            await asyncio.sleep(0.01)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    order: list[str] = []
    tensor = torch.ones(5)
    asyncio.run(main())
    assert (order, tensor.numel()) == (["first", "second"], 0)
