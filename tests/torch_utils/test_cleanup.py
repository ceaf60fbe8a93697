"""Tests of SafePyTorchCleanup as a block and as a decorator."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, attr-defined, type-var, union-attr"

import asyncio
import contextlib
import gc
import logging
import signal
import threading
import types
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.counted_resource import Counted
from tests.support.programs import output_of
from tests.support.releasing import weak, without_collector
from tests.support.threads import in_threads
from torch_utils import CleanupError, ReleasedError, SafePyTorchCleanup, TorchUtilsError, release


def failing(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


def test_scope_releases_last_in_first_out() -> None:
    order: list[str] = []
    model = nn.Linear(16, 16)
    passed = [types.SimpleNamespace(close=partial(order.append, name)) for name in "ab"]
    with SafePyTorchCleanup(*passed, model) as scope:
        assert scope.report is None
        tensor = scope.manage(torch.ones(100))
        assert scope.callback(order.append, "first") == order.append
        scope.callback(order.append, "second")
    assert order == ["second", "first", "b", "a"]
    assert tensor.numel() == 0
    assert scope.report.freed_bytes == {"host": 4 * (16 * 16 + 16 + 100)}
    with pytest.raises(ReleasedError):
        model(torch.ones(1, 16))


@pytest.mark.parametrize("error", [KeyError("mine"), None])
def test_strict_raises_failures_as_a_group_or_notes_on_the_error_of_the_block(error: Any) -> None:
    tensor = torch.ones(10)
    with pytest.raises((KeyError, CleanupError)) as caught:
        with SafePyTorchCleanup(tensor, strict=True) as scope:
            scope.callback(failing(ValueError("a")))
            scope.callback(failing(OSError("b")))
            if error is not None:
                raise error
    assert tensor.numel() == 0
    if error is not None:
        assert caught.value is error
        assert error.__cause__ is error.__context__ is None
        assert sum("also failed" in note for note in error.__notes__) == 2
        return
    assert str(caught.value).startswith("2 steps of the cleanup failed")
    assert [str(e) for e in caught.value.subgroup((OSError, ValueError)).exceptions] == ["b", "a"]


def test_failing_callback_is_logged_once_skips_nothing_and_keeps_no_argument_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def save(tensor: torch.Tensor) -> None:
        raise OSError("disk full")

    tensor = torch.ones(10)
    (storage,) = weak(tensor)
    with SafePyTorchCleanup() as scope:
        other = scope.manage(torch.ones(10))
        scope.callback(save, tensor)
        del tensor
    assert other.numel() == 0
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    caplog.clear()  # pytest keeps the records and their tracebacks.
    assert storage.expired() and len(scope.report.errors) == 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^SafePyTorchCleanup\(\) cannot release"):
        SafePyTorchCleanup(object())
    with pytest.raises(ValueError, match="collect must be"):
        SafePyTorchCleanup(collect="maybe")
    scope = SafePyTorchCleanup()
    for use in (lambda: scope.manage(torch.ones(1)), lambda: scope.callback(print)):
        with pytest.raises(TorchUtilsError, match="not open; use it inside its with block"):
            use()
    with scope:
        with pytest.raises(TypeError, match=r"^manage\(\) cannot release"):
            scope.manage(object())
        for call in (lambda: scope.callback(None), lambda: scope.manage(object(), close=5)):
            with pytest.raises(TypeError, match="pass it without calling it"):
                call()
    assert scope.report.errors == ()


def test_nested_releases_count_once() -> None:
    tensor = torch.ones(1000)
    with SafePyTorchCleanup() as scope:
        scope.manage(Counted(lambda self: release(tensor)))
        scope.manage(torch.ones(10))
    assert scope.report.freed_bytes == {"host": 4040}


def test_restore_flags_restores_changed_flags() -> None:
    cudnn = torch.backends.cudnn
    flags: list[tuple[Any, Any, Any]] = [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (torch.get_default_device, torch.set_default_device, torch.device("meta")),
        (torch.is_grad_enabled, torch.set_grad_enabled, False),
        (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        (lambda: cudnn.benchmark, partial(setattr, cudnn, "benchmark"), True),
    ]
    before = [read() for read, _, _ in flags]
    with pytest.raises(ValueError, match="mine"), SafePyTorchCleanup(restore_flags=True):
        with SafePyTorchCleanup():  # The control: without the option they stay changed.
            for _, write, value in flags:
                write(value)
        assert [read() for read, _, _ in flags] == [value for _, _, value in flags]
        raise ValueError("mine")
    assert [read() for read, _, _ in flags] == before


@pytest.mark.slow
def test_determinism_of_compiled_code_is_restored() -> None:
    output_of("""
    import torch
    from torch_utils import SafePyTorchCleanup
    with SafePyTorchCleanup(restore_flags=True):
        torch.use_deterministic_algorithms(True)
    inductor = getattr(torch._inductor.config, "deterministic", False)
    assert (torch.are_deterministic_algorithms_enabled(), inductor) == (False, False)
    """)


@pytest.mark.usefixtures("frozen_heap")
def test_scope_without_exit_ends_when_collected() -> None:
    scope = SafePyTorchCleanup().__enter__()
    tensor = scope.manage(torch.ones(5))
    with pytest.warns(ResourceWarning, match="unclosed SafePyTorchCleanup"):
        del scope
        gc.collect()
    assert tensor.numel() == 0


def test_forked_child_does_not_use_its_parents_scope() -> None:
    output = output_of("""
    import os, sys
    from torch_utils import SafePyTorchCleanup, TorchUtilsError
    with SafePyTorchCleanup() as scope:
        scope.callback(print, "parent's", flush=True)
        if os.fork() == 0:
            try: scope.callback(print, "lost", flush=True)
            except TorchUtilsError as error: print("parent process" in str(error), flush=True)
            with SafePyTorchCleanup() as own: own.callback(print, "child's", flush=True)
            sys.exit(0)
        os.wait()
        scope.callback(print, "parent's newest", flush=True)
    """)
    assert output.splitlines() == ["True", "child's", "parent's newest", "parent's"]


# Decorators


def test_decorator_opens_a_scope_for_each_call() -> None:
    before = torch.get_num_threads()

    @SafePyTorchCleanup(restore_flags=True)
    def work(size: int) -> list[int]:
        """Work."""
        torch.set_num_threads(before + size)
        return [size]

    @SafePyTorchCleanup(restore_flags=True)
    async def work_async(size: int) -> list[int]:
        await asyncio.sleep(0)
        return work(size)

    assert (work(3), work.__doc__) == ([3], "Work.")
    assert asyncio.run(work_async(4)) == [4]
    assert torch.get_num_threads() == before


def test_decorator_refuses_generators_and_resources() -> None:
    with pytest.raises(TypeError, match="takes no resources as a decorator"):
        SafePyTorchCleanup(torch.ones(1))(print)  # The first call would release it.

    def generate() -> Any:
        yield

    async def generate_async() -> Any:
        yield

    for function in (generate, generate_async):
        with pytest.raises(TypeError, match=r"not <function .*generate.*use a with block instead"):
            SafePyTorchCleanup()(function)


# Coroutines


def test_cancellation_skips_no_step() -> None:
    order: list[str] = []
    tensor = torch.ones(5)

    async def step(name: str, is_cancelled: bool) -> None:
        order.append(name)
        if is_cancelled:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        order.append("after " + name)

    async def main() -> None:
        async with SafePyTorchCleanup(tensor) as scope:
            scope.callback(step, "fourth", False)
            scope.callback(step, "third", True)
            scope.callback(step, "second", True)
            scope.callback(step, "first", False)
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert order == ["first", "after first", "second", "third", "fourth", "after fourth"]
    assert tensor.numel() == 0


@pytest.mark.parametrize("in_block", [True, False])
def test_callbacks_that_cannot_be_awaited_are_errors_in_the_report(in_block: bool) -> None:
    """In a coroutine that is closed, where the others run, and in a plain `with`."""
    order: list[str] = []
    tensor = torch.ones(5)
    scope = SafePyTorchCleanup()

    async def never() -> None:
        order.append("awaited")

    async def work() -> None:
        async with scope:
            scope.manage(tensor)
            scope.callback(order.append, "plain")
            scope.callback(never)
            if in_block:
                await asyncio.sleep(0)
            scope.callback(asyncio.sleep, 0)

    coroutine = work()
    coroutine.send(None)
    coroutine.close()
    assert (order, tensor.numel()) == (["plain"], 0)
    assert "has to be awaited" in str(scope.report.errors[0])
    with scope:
        scope.callback(never)
    assert order == ["plain"]
    assert "`async with`" in str(scope.report.errors[0])


# One scope object, opened again


def test_scope_can_be_entered_again_after_its_block_only() -> None:
    scope = SafePyTorchCleanup()
    for size in (1, 2):
        with scope:
            tensor = scope.manage(torch.ones(size))
            with pytest.raises(TorchUtilsError, match="create a SafePyTorchCleanup for each block"):
                scope.__enter__()
            assert tensor.numel() == size
        assert tensor.numel() == 0
        assert scope.report.freed_bytes == {"host": 4 * size}


@pytest.mark.usefixtures("hasty")
def test_one_of_two_threads_enters_a_scope() -> None:
    for _ in range(100):
        scope = SafePyTorchCleanup()
        results = in_threads(scope.__enter__, scope.__enter__)
        assert [type(result) for result in results if result is not scope] == [TorchUtilsError]
        scope.__exit__(None, None, None)


@pytest.mark.parametrize("error", [None, ValueError("of the block")])
def test_interrupted_cleanup_goes_on_and_raises_the_interrupt(error: Any) -> None:
    """Also one that comes before a callback is awaited."""
    order: list[str] = []

    async def closer() -> None:
        order.append("awaited")

    def interrupt(is_async: bool) -> Any:
        signal.raise_signal(signal.SIGINT)
        return closer() if is_async else failing(ValueError("of a callback"))()

    async def work() -> None:
        async with SafePyTorchCleanup() as scope:
            scope.callback(interrupt, True)
            if error is not None:
                raise error

    scope = SafePyTorchCleanup(strict=True)
    with pytest.raises(KeyboardInterrupt), scope:
        scope.callback(order.append, "ran")
        scope.callback(interrupt, False)
        if error is not None:
            raise error
    assert [str(error) for error in scope.report.errors] == ["of a callback"]
    with pytest.raises(KeyboardInterrupt):
        work().send(None)
    assert order == ["ran", "awaited"]


def test_interrupted_cleanup_leaves_no_cycle() -> None:
    def work() -> StorageWeakRef:
        large = torch.ones(1000)
        with contextlib.suppress(KeyboardInterrupt), SafePyTorchCleanup(collect="never") as scope:
            scope.callback(signal.raise_signal, signal.SIGINT)
        return weak(large)[0]

    with without_collector():
        assert work().expired()


def test_close_function_gets_the_object_if_it_needs_it() -> None:
    """Builtins without a signature get it, unless they are methods of an object."""
    lock = threading.Lock()
    handles: list[list[int]] = [[1], [2]]
    closed: list[int] = []
    with SafePyTorchCleanup() as scope:
        scope.manage(handles, close=list.clear)
        scope.manage(lock, close=lock.acquire)
        scope.manage([3], close=handles[0].append)
        scope.manage(handles[1], close=lambda handle: closed.append(len(handle)))
        with pytest.raises(TypeError, match="or with the object alone"):
            scope.manage(object(), close=lambda first, second: None)
    assert (handles, lock.locked(), closed) == ([], True, [1])


def test_scope_keeps_no_resource_that_was_closed_meanwhile() -> None:
    with SafePyTorchCleanup() as scope:
        kept = [weakref.ref(scope.manage(Counted())) for _ in range(20)]
        assert None not in [find() for find in kept], "what is open is kept"
        for find in kept[:15]:
            find().close()
        assert [find() is None for find in kept] == [True] * 15 + [False] * 5
    assert [find() for find in kept] == [None] * 20


@pytest.mark.usefixtures("hasty")
def test_what_another_thread_adds_at_the_end_is_refused_or_released() -> None:
    def add(numbers: range) -> None:
        for number in numbers:
            scope.callback(closed.append, number)
            accepted.append(number)

    for _ in range(30):
        accepted, closed = list[int](), list[int]()
        scope = SafePyTorchCleanup(collect="never").__enter__()
        end = partial(scope.__exit__, None, None, None)
        in_threads(partial(add, range(100)), partial(add, range(100, 200)), end)
        assert sorted(closed) == sorted(accepted)
