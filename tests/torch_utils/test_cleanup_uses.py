"""One scope, several uses at once: each releases its own, whoever ends first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import Any

import pytest
import torch

from programs import assert_clean, run
from torch_utils import SafePyTorchCleanup, TorchUtilsError


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


def test_a_dropped_exit_stack_ends_the_scope() -> None:
    """When nobody can end it any more, it ends; what was opened by hand stays to the exit."""
    stack, scope = contextlib.ExitStack(), SafePyTorchCleanup()
    stack.enter_context(scope)
    tensor = scope.manage(torch.ones(5))
    del stack
    gc.collect()
    assert tensor.numel() == 0


def test_what_cannot_be_called_is_refused_at_once() -> None:
    """``callback(fn())`` has called it already; the end of the block would be late to say so."""
    with SafePyTorchCleanup() as scope:
        for call in (lambda: scope.callback(None), lambda: scope.manage(object(), close=5)):
            with pytest.raises(TypeError, match="pass it without calling it"):
                call()
    assert scope.report is not None
    assert scope.report.errors == ()


@pytest.mark.parametrize("wrong", [int, None, 5])
def test_only_functions_are_decorated(wrong: Any) -> None:
    """A class would become a function, and the scope would end with its ``__init__``."""
    with pytest.raises(TypeError, match="decorates functions and methods, not "):
        SafePyTorchCleanup()(wrong)
