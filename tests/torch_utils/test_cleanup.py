"""SafePyTorchCleanup: everything is released at the end, and the user's exception wins."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from programs import assert_clean, run
from torch_utils import (
    CleanupError,
    ReleasedError,
    Resource,
    SafePyTorchCleanup,
    TorchUtilsError,
    release,
)


def failing(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


def test_releases_last_in_first_out() -> None:
    """Managed objects and callbacks in reverse order; the report says what was freed."""
    order: list[str] = []
    model = nn.Linear(16, 16)
    with SafePyTorchCleanup(model) as scope:
        assert scope.report is None
        tensor = scope.manage(torch.ones(100))
        assert scope.callback(order.append, "first") == order.append
        scope.callback(order.append, "second")
    assert order == ["second", "first"]
    assert tensor.numel() == 0
    assert scope.report.freed_bytes == {"host": 4 * (16 * 16 + 16 + 100)}
    with pytest.raises(ReleasedError):
        model(torch.ones(1, 16))


def test_manage_with_a_closer() -> None:
    """A closer is called, with the object if it needs an argument."""

    class Pool:
        stopped = 0

        def stop(self) -> None:
            self.stopped += 1

    with SafePyTorchCleanup() as scope:
        one = scope.manage(Pool(), close=Pool.stop)
        two = Pool()
        assert scope.manage(two, close=two.stop) is two
        three = scope.manage(Pool(), close=lambda pool: pool.stop())
    assert (one.stopped, two.stopped, three.stopped) == (1, 1, 1)


def test_the_exception_of_the_block_wins() -> None:
    """It is the same object, with a note for each failure, which is logged once too."""
    error = KeyError("mine")
    scope = SafePyTorchCleanup(strict=True)
    with pytest.raises(KeyError) as caught, scope:
        scope.callback(failing(ValueError("cleanup")))
        scope.callback(failing(KeyboardInterrupt()))
        raise error
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert sum("also failed" in note for note in error.__notes__) == 2


def test_errors_are_reported_logged_and_skip_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Without strict, an error is in the report and in the log, and the rest is released."""
    with SafePyTorchCleanup() as scope:
        tensor = scope.manage(torch.ones(10))
        scope.callback(failing(ValueError("no")))
    assert tensor.numel() == 0
    assert [str(e) for e in scope.report.errors] == ["no"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_strict_raises_a_group() -> None:
    """With strict, all failures come as one group after everything was released."""
    tensor = torch.ones(10)
    with pytest.raises(CleanupError, match="2 steps of the cleanup failed") as caught:
        with SafePyTorchCleanup(tensor, strict=True) as scope:
            scope.callback(failing(ValueError("a")))
            scope.callback(failing(OSError("b")))
    assert tensor.numel() == 0
    assert {type(e) for e in caught.value.exceptions} == {ValueError, OSError}
    if sys.version_info >= (3, 11):
        assert caught.value.subgroup(OSError).exceptions[0].args == ("b",)


def test_interrupt_arrives_after_the_rest() -> None:
    """KeyboardInterrupt out of one step is raised when all the others have run."""
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt), SafePyTorchCleanup() as scope:
        scope.callback(order.append, "ran")
        scope.callback(failing(KeyboardInterrupt()))
    assert order == ["ran"]


def test_bad_arguments() -> None:
    """Mistakes are errors when they are made, and outside of a block there is no scope."""
    with pytest.raises(TypeError, match="does not know how"):
        SafePyTorchCleanup(object())
    with pytest.raises(ValueError, match="collect must be"):
        SafePyTorchCleanup(collect="maybe")  # type: ignore[arg-type]
    scope = SafePyTorchCleanup()
    for use in (lambda: scope.manage(torch.ones(1)), lambda: scope.callback(print)):
        with pytest.raises(TorchUtilsError, match="not open; use it inside its with block"):
            use()
    with scope, pytest.raises(TypeError, match="does not know how"):
        scope.manage(object())


def test_reuse_and_nesting() -> None:
    """The same scope, in itself and again afterwards; each use releases its own."""
    scope = SafePyTorchCleanup()
    for _ in range(2):
        with scope:
            outer = scope.manage(torch.ones(1))
            with scope:
                inner = scope.manage(torch.ones(1))
            assert (inner.numel(), outer.numel()) == (0, 1)
        assert outer.numel() == 0


def test_threads_at_once() -> None:
    """Each thread's use is its own, and so is its report."""
    scope = SafePyTorchCleanup()
    barrier = threading.Barrier(4)
    wrong: list[object] = []

    def use(size: int) -> None:
        for _ in range(20):
            with scope:
                tensor = scope.manage(torch.ones(size))
                barrier.wait()
                if tensor.numel() != size:
                    wrong.append("released by another thread")
                barrier.wait()
            if scope.report.freed_bytes != {"host": 4 * size}:
                wrong.append(scope.report)

    threads = [threading.Thread(target=use, args=(size,)) for size in (10, 20, 30, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_helper_thread_uses_the_open_scope() -> None:
    """A thread started in the block manages into that block."""
    with SafePyTorchCleanup() as scope:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(scope.manage(torch.ones(5))))
        thread.start()
        thread.join()
        assert made[0].numel() == 5
    assert made[0].numel() == 0


def test_decorator_of_a_function() -> None:
    """Each call is a use; metadata and results are the function's."""
    scope = SafePyTorchCleanup()

    @scope
    def work(size: int) -> torch.Tensor:
        """Work."""
        return scope.manage(torch.ones(size))

    assert work(3).numel() == 0
    assert work.__doc__ == "Work."
    assert scope.report.freed_bytes == {"host": 12}


def test_decorator_of_generators() -> None:
    """The scope is open while the generator runs, and closed however it ends."""
    scope = SafePyTorchCleanup()
    tensors: list[torch.Tensor] = []

    @scope
    def numbers() -> Any:
        tensors.append(scope.manage(torch.ones(5)))
        got = yield 1
        yield got
        return "end"

    generator = numbers()
    assert next(generator) == 1
    assert tensors[0].numel() == 5
    assert generator.send("sent") == "sent"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert (stop.value.value, tensors[0].numel()) == ("end", 0)
    unfinished = numbers()
    next(unfinished)
    unfinished.close()
    assert tensors[1].numel() == 0


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


def test_tasks_at_once() -> None:
    """Interleaved tasks of one thread each release their own."""
    scope = SafePyTorchCleanup()

    async def use(size: int) -> None:
        async with scope:
            tensor = scope.manage(torch.ones(size))
            await asyncio.sleep(0.001 * (5 - size))
            assert tensor.numel() == size
        assert tensor.numel() == 0

    async def main() -> None:
        await asyncio.gather(*(use(size) for size in range(1, 5)))

    asyncio.run(main())


def test_coroutine_in_a_plain_with() -> None:
    """What cannot be awaited is an error in the report, and no warning."""

    async def closer() -> None: ...

    with SafePyTorchCleanup() as scope:
        scope.callback(closer)
    assert "use `async with`" in str(scope.report.errors[0])


def test_restore_flags() -> None:
    """torch's switches are as before, also after an error; untouched ones are not touched."""
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    with pytest.raises(ValueError, match="mine"), SafePyTorchCleanup(restore_flags=True):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device("meta")
        raise ValueError("mine")
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before
    assert torch.backends.cudnn.benchmark is False
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.ones(1).device.type == "cpu"
    assert getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None


def test_flags_stay_without_restore() -> None:
    """Negative control: by default nothing is put back."""
    with SafePyTorchCleanup():
        torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = False


def test_nested_reports_count_once() -> None:
    """What a resource releases itself is in the scope's report, once."""

    class Owner(Resource):
        def __init__(self) -> None:
            self.tensor = torch.ones(1000)

        def _release(self) -> None:
            from torch_utils import release

            release(self.tensor)

    with SafePyTorchCleanup() as scope:
        scope.manage(Owner())
        scope.manage(torch.ones(10))
    assert scope.report.freed_bytes == {"host": 4040}


def test_open_scope_is_closed_at_exit() -> None:
    """In order with resources, whoever has forgotten it; weights are left to the system."""
    result = run("""
    from torch_utils import Resource, SafePyTorchCleanup

    class R(Resource):
        def __init__(self, name): self.name = name
        def _release(self): print(self.name, flush=True)

    first = R("first")
    SafePyTorchCleanup().__enter__().callback(print, "scope", flush=True)
    last = R("last")

    def suspended():
        with SafePyTorchCleanup() as scope:
            scope.callback(print, "generator", flush=True)
            yield
    kept = suspended(); next(kept)
    """)
    assert_clean(result)
    assert result.stdout == "generator\nlast\nscope\nfirst\n"


def test_forked_child_leaves_the_scope_alone() -> None:
    """A child that leaves through the block, or by sys.exit, runs nothing of its parent's."""
    result = run("""
    import os, sys
    from torch_utils import SafePyTorchCleanup
    with SafePyTorchCleanup() as scope:
        scope.callback(print, "parent's", flush=True)
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    """)
    assert_clean(result)
    assert result.stdout == "parent's\n"


def test_interleaved_generators() -> None:
    """Each generator's block is its own, whichever of them is resumed or ended first."""
    scope = SafePyTorchCleanup()

    @scope
    def decorated(tensors: list[torch.Tensor]) -> Any:
        tensors.append(scope.manage(torch.ones(5)))
        yield
        tensors.append(scope.manage(torch.ones(5)))
        yield

    def plain(tensors: list[torch.Tensor]) -> Any:
        with scope:
            tensors.append(scope.manage(torch.ones(5)))
            yield
            tensors.append(scope.manage(torch.ones(5)))
            yield

    for kind in (decorated, plain):
        first, second = [], []
        a, b = kind(first), kind(second)
        next(a), next(b), next(a), next(b)
        a.close()
        assert [t.numel() for t in first] == [0, 0]
        assert [t.numel() for t in second] == [5, 5]
        b.close()
        assert [t.numel() for t in second] == [0, 0]


def test_sessions_closed_first_in_first_out() -> None:
    """Two @contextmanager sessions of one scope: the one that ends releases its own."""
    scope = SafePyTorchCleanup()

    @contextlib.contextmanager
    def session() -> Any:
        with scope:
            yield scope.manage(torch.ones(5))

    a, b = session(), session()
    one, two = a.__enter__(), b.__enter__()
    with pytest.raises(TorchUtilsError, match="open 2 times, and this call is in none"):
        scope.manage(torch.ones(1))
    a.__exit__(None, None, None)
    assert (one.numel(), two.numel()) == (0, 5)
    b.__exit__(None, None, None)
    assert two.numel() == 0


def test_exit_stacks_in_any_order() -> None:
    """Two exit stacks of one thread on one scope, and one that another task closes."""
    scope = SafePyTorchCleanup()
    tensors: list[torch.Tensor] = []

    def opened() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(scope)
        tensors.append(scope.manage(torch.ones(5)))
        return stack

    first, second = opened(), opened()
    first.pop_all().close()
    assert [t.numel() for t in tensors] == [0, 5]
    second.close()
    assert tensors[1].numel() == 0

    async def main() -> None:
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(scope)
        theirs = scope.manage(torch.ones(5))

        async def other() -> None:
            async with scope:
                mine = scope.manage(torch.ones(5))
                await stack.aclose()
                assert (theirs.numel(), mine.numel()) == (0, 5)
            assert mine.numel() == 0

        await asyncio.create_task(other())

    asyncio.run(main())


def test_helper_threads_of_tasks() -> None:
    """asyncio.to_thread manages into the block of the task that asked, nested ones included."""
    scope = SafePyTorchCleanup()

    async def use(size: int, nested: bool) -> None:
        async with scope:
            outer = await asyncio.to_thread(scope.manage, torch.ones(size))
            if nested:
                async with scope:
                    inner = await asyncio.to_thread(scope.manage, torch.ones(size))
                    await asyncio.sleep(0.002)
                assert (inner.numel(), outer.numel()) == (0, size)
            await asyncio.sleep(0.001 * (5 - size))
            assert outer.numel() == size
        assert outer.numel() == 0

    async def main() -> None:
        await asyncio.gather(*(use(size, size % 2 == 0) for size in range(1, 5)))

    asyncio.run(main())


def test_ended_by_hand() -> None:
    """One that was opened by hand is ended by hand; of two, it cannot be told which."""
    scope = SafePyTorchCleanup()
    scope.__enter__()
    tensor = scope.manage(torch.ones(5))
    with scope:
        pass
    assert tensor.numel() == 5
    scope.__exit__(None, None, None)
    assert tensor.numel() == 0

    result = run("""
    from torch_utils import SafePyTorchCleanup, TorchUtilsError
    scope = SafePyTorchCleanup()
    def enter(name):
        scope.__enter__()
        scope.callback(print, name, flush=True)
    def leave(): scope.__exit__(None, None, None)
    enter("first"); enter("second")
    try: leave()
    except TorchUtilsError as error: print("does not say which" in str(error), flush=True)
    """)
    assert_clean(result)
    assert result.stdout == "True\nsecond\nfirst\n"


def test_manage_in_a_forked_child_is_refused() -> None:
    """The parent will not release the child's, and says so in time; a scope of its own does."""
    result = run("""
    import os, sys
    from torch_utils import SafePyTorchCleanup, TorchUtilsError
    with SafePyTorchCleanup() as scope:
        if os.fork() == 0:
            try: scope.callback(print, "lost", flush=True)
            except TorchUtilsError as error: print("parent process" in str(error), flush=True)
            own = SafePyTorchCleanup()
            with own: own.callback(print, "child's", flush=True)
            sys.exit(0)
        os.wait()
        scope.callback(print, "parent's", flush=True)
    """)
    assert_clean(result)
    assert result.stdout == "True\nchild's\nparent's\n"


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


def test_a_dropped_exit_stack_ends_the_scope() -> None:
    """When nobody can end it any more, it ends; what was opened by hand stays to the exit."""
    stack, scope = contextlib.ExitStack(), SafePyTorchCleanup()
    stack.enter_context(scope)
    tensor = scope.manage(torch.ones(5))
    del stack
    gc.collect()
    assert tensor.numel() == 0


def test_decorator_without_parentheses() -> None:
    """The error says what is missing, and not that a function cannot be released."""
    with pytest.raises(TypeError, match=r"@SafePyTorchCleanup\(\), with parentheses"):

        @SafePyTorchCleanup
        def function() -> None: ...
