"""find_batch_size: nothing of a failed try is left when the next one starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from programs import assert_clean, run_forked
from torch_utils import find_batch_size


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory.")


def test_halves_until_it_fits() -> None:
    """The sizes that are tried, what is returned, and the size that is kept."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=128)
    def work(batch_size: int, text: str, end: str = "") -> str:
        tried.append(batch_size)
        if batch_size > 8:
            out_of_memory()
        return text + end

    assert work("x", end="y") == "xy"
    assert tried == [128, 64, 32, 16, 8]
    work("x")
    assert tried[-1] == 8


def test_bare_decorator_and_own_reduction() -> None:
    """Without arguments it starts at 128; the reduction may be the program's own."""

    @find_batch_size
    def first(batch_size: int) -> int:
        return batch_size

    assert first() == 128
    sizes = iter([100, 7])

    @find_batch_size(reduce_batch_size_fn=lambda: next(sizes))
    def second(batch_size: int) -> int:
        return batch_size if batch_size < 100 else out_of_memory()  # type: ignore[return-value]

    assert second() == 7


@pytest.mark.parametrize("start", [0, 4])
def test_no_size_fits(start: int) -> None:
    """Never below 1; the last try's own error is the cause."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=start)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        out_of_memory()

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero") as e:
        work()
    assert 0 not in tried
    assert (str(e.value.__cause__) == "CUDA out of memory.") is bool(start)


def test_batch_size_from_the_caller_is_refused() -> None:
    """The error says what to call instead."""

    @find_batch_size
    def work(batch_size: int, a: int, b: int) -> None: ...

    with pytest.raises(TypeError, match="Batch size was passed into `work` as the first argument"):
        work(128, 1, 2)


def test_other_errors_go_on() -> None:
    """An error that is not about memory is the caller's, at once."""
    tried: list[int] = []

    @find_batch_size
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    assert tried == [128]


def test_restores_upward_when_asked() -> None:
    """After some successes twice the size is tried again, never above the start."""
    limit = 4
    tried: list[int] = []

    @find_batch_size(starting_batch_size=16, restore_after=2)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > limit:
            out_of_memory()

    work()
    work()
    limit = 100
    for _ in range(6):
        work()
    assert tried == [16, 8, 4, 4, 8, 8, 16, 16, 16, 16]


def test_failed_try_is_gone_when_caches_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor, in a frame of the exception, does not outlive the clearing."""
    alive: list[bool] = []
    storages: list[StorageWeakRef] = []
    monkeypatch.setattr(
        "torch_utils.batch_size.empty_caches", lambda: alive.append(not storages[-1].expired())
    )

    @find_batch_size(starting_batch_size=4)
    def work(batch_size: int) -> None:
        tensor = torch.ones(1000 * batch_size)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        if batch_size > 1:
            try:
                out_of_memory()
            except RuntimeError as error:
                raise ValueError("while working") from error

    work()
    assert alive == [False, False]


def test_peers_way_keeps_the_failed_try_alive() -> None:
    """Negative control: in accelerate's decorator the tensor is alive at every clearing."""
    memory = pytest.importorskip("accelerate.utils.memory", reason="needs accelerate")
    alive: list[bool] = []
    storages: list[StorageWeakRef] = []

    def work(batch_size: int) -> None:
        tensor = torch.ones(10)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        if batch_size > 120:
            raise RuntimeError("CUDA out of memory.")

    original = memory.clear_device_cache
    memory.clear_device_cache = lambda **_: alive.append(
        bool(storages) and not storages[-1].expired()
    )
    try:
        memory.find_executable_batch_size(work)()
    finally:
        memory.clear_device_cache = original
    assert True in alive


def test_under_a_real_limit() -> None:
    """With the address space limited, a size that fits is found, and the process lives."""
    program = """
    import resource, torch
    from torch_utils import find_batch_size, is_out_of_memory

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), used + (600 << 20)))
    tried = []

    @find_batch_size(starting_batch_size=64)
    def work(batch_size):
        tried.append(batch_size)
        kept = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(batch_size)]
        return sum(int(t[-1]) for t in kept)

    assert work() == tried[-1] >= 16, tried
    assert tried[0] == 64 and len(tried) > 1, tried
    """
    assert_clean(run_forked(program))


def test_an_error_while_an_older_one_is_handled() -> None:
    """Only what the call itself raised counts, and the older error's variables are left alone."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=8)
    def work(batch_size: int, cause: BaseException | None) -> None:
        tried.append(batch_size)
        raise ValueError("not about memory") from cause

    def run_out() -> None:
        tensor = torch.ones(10)
        raise MemoryError(StorageWeakRef(tensor.untyped_storage()))

    try:
        run_out()
    except MemoryError as older:
        with pytest.raises(ValueError, match="not about memory") as caught:
            work(None)
        assert caught.value.__context__ is older
        assert tried == [8]
        assert not older.args[0].expired()
        # Who names it as the cause says that memory ran out.
        with pytest.raises(RuntimeError, match="No executable batch size"):
            work(older)
        assert tried == [8, 8, 4, 2, 1]
        assert not older.args[0].expired()


def test_the_older_error_itself_raised_again() -> None:
    """What was raised before the call is no lack of memory for this size of batch."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=8)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        raise

    with pytest.raises(MemoryError):
        try:
            raise MemoryError
        except MemoryError:
            work()
    assert tried == [8]


def test_what_the_call_handles_itself_counts() -> None:
    """An error out of the call's own handling of a lack of memory means a lack of memory."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=8)
    def work(batch_size: int) -> int:
        tried.append(batch_size)
        try:
            if batch_size > 2:
                out_of_memory()
        except RuntimeError:
            raise ValueError("while handling")
        return batch_size

    try:
        raise KeyError("older")
    except KeyError:
        assert work() == 2
    assert tried == [8, 4, 2]


def test_another_factor() -> None:
    """The sizes go down by the factor that is asked for, and up again by the same."""
    tried: list[int] = []
    limit = 5

    @find_batch_size(starting_batch_size=10, factor=0.9, restore_after=1)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > limit:
            out_of_memory()

    work()
    assert tried == [10, 9, 8, 7, 6, 5]
    limit = 100
    for _ in range(6):
        work()
    assert tried[6:] == [6, 7, 8, 9, 10, 10]
    for factor in (0, 1, -1, 2):
        with pytest.raises(ValueError, match="factor must be between 0 and 1"):
            find_batch_size(factor=factor)


@pytest.mark.parametrize("size", ["a", 2.5, -1, True])
def test_no_size(size: Any) -> None:
    """What is no size is refused when decorating."""
    with pytest.raises(ValueError, match="starting_batch_size must be"):
        find_batch_size(starting_batch_size=size)(len)


def test_a_size_for_a_function() -> None:
    """The size in the function's place is told where it belongs."""
    with pytest.raises(TypeError, match="starting_batch_size="):
        find_batch_size(5)  # type: ignore[call-overload]
