"""Tests of ModelPool: budgets, eviction and errors."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, call-arg, func-returns-value"

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import hosted_models
from tests.support.hosting_stub import Stub
from tests.support.threads import errors_in_threads
from tests.support.waiting import is_there, wait_for, wait_for_async
from torch_utils import (
    DeviceMemory,
    MemorySnapshot,
    ModelInUseError,
    ModelPool,
    NoRoomError,
    ResourceClosedError,
    UnknownModelError,
)

torch = pytest.importorskip("torch")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from torch_utils.hosting import pool as module  # noqa: E402

SOON_S = 0.2
WAIT_S = 60.0
MB = 1 << 20


def tensor(size_mb: int) -> Any:
    """Reserve memory that is never touched, which costs nothing."""
    return torch.empty(size_mb * MB, dtype=torch.uint8)


def is_whole(model: Any) -> bool:
    """Return whether a tensor still has its memory."""
    return bool(getattr(model, "tensor", model).numel())


def make(pool: ModelPool, load: Any = tensor, **sizes: int) -> ModelPool:
    for name, size in sizes.items():
        pool.add(name, partial(load, size))
    return pool


def loaded(pool: ModelPool) -> list[str]:
    return [name for name, status in pool.status().items() if status.state == "loaded"]


def use(pool: ModelPool, *names: str) -> None:
    for name in names:
        with pool.lease(name) as model:
            assert is_whole(model)


@pytest.mark.parametrize("budget", [250 * MB, {"host": 250 * MB}, {"cuda:0": 1}])
def test_least_recently_used_model_is_evicted_first(budget: Any) -> None:
    """By the end of its last lease, not by its load. A budget of a device counts for that only."""
    most = 2 if budget == {"cuda:0": 1} else None
    with make(ModelPool(budget_bytes=budget, max_loaded=most), a=100, b=100, c=100) as pool:
        use(pool, "a", "b", "a", "c")
        assert loaded(pool) == ["a", "c"]
        assert pool.status()["b"].unloads == 1
        assert 100 * MB <= pool.status()["a"].nbytes < 150 * MB


def test_lent_model_is_not_evicted_and_error_names_it() -> None:
    with make(ModelPool(budget_bytes=250 * MB), a=100, b=100, c=100) as pool:
        for _ in range(2):  # The second time its size is known.
            with pool.lease("a") as a, pool.lease("b") as b:
                with pytest.raises(NoRoomError) as caught:
                    pool.lease("c", SOON_S).__enter__()
                assert is_whole(a) and is_whole(b)
            text = str(caught.value)
            assert "no room for c: the budget is 262.1 MB" in text
            assert text.count(__file__) == 2 and "a has 10" in text


@pytest.mark.parametrize("act", ["wait", "unload", "remove"])
def test_load_waits_for_room_until_a_lease_ends(act: str) -> None:
    """The model can be unloaded and removed meanwhile, also by the caller that takes the room."""

    async def main() -> None:
        async with pool.alease("a"):
            pending = asyncio.create_task(pool.call("b", is_whole, timeout_s=WAIT_S))
            await wait_for_async(lambda: pool.status()["b"].state == "loading")
            assert act == "wait" or not getattr(pool, act)("b").freed_bytes
            if act == "remove":
                with pytest.raises(ResourceClosedError, match="add it to its pool"):
                    await pending
        assert act == "remove" or await pending

    with make(ModelPool(max_loaded=1), a=1, b=1) as pool:
        asyncio.run(main())
        assert loaded(pool) == (["a"] if act == "remove" else ["b"])


def test_model_that_can_never_fit_evicts_no_other() -> None:
    loads: list[int] = []
    with make(ModelPool(budget_bytes=250 * MB), a=100, b=100) as pool:
        pool.add("big", lambda: (loads.append(1), tensor(300))[1])
        use(pool, "a", "b")
        for _ in range(2):
            with pytest.raises(NoRoomError, match="it needs 31"):
                use(pool, "big")
        assert (loaded(pool), loads) == (["a", "b"], [1])


def test_declared_size_replaces_measured_size(caplog: pytest.LogCaptureFixture) -> None:
    """A size that is neither declared nor measured is logged."""
    with make(ModelPool(budget_bytes=250 * MB), a=100) as pool:
        pool.add("b", Stub, nbytes=200 * MB)
        pool.add("c", Stub, nbytes={"host": 300 * MB})
        pool.add("unknown", Stub)
        use(pool, "a")
        with pool.lease("b"), pool.lease("unknown"):
            assert (loaded(pool), pool.status()["b"].nbytes) == (["b", "unknown"], 200 * MB)
        with pytest.raises(NoRoomError, match="it needs 31"):
            pool.lease("c").__enter__()
        assert len(Stub.made) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith("unknown holds no tensors or arrays")


def test_thread_that_holds_all_room_gets_an_error() -> None:
    """It would wait for itself, also in a load function, a call or a replacement."""
    pool = make(ModelPool(max_loaded=1), a=1, b=1)
    pool.add("outer", lambda: pool.lease("a").__enter__())
    with pool:
        with pool.lease("a"), pytest.raises(NoRoomError, match="this thread itself holds what"):
            pool.lease("b").__enter__()
        with pytest.raises(NoRoomError, match="outer has 0 B"), pool.lease("outer"):
            pass
        assert asyncio.run(pool.call("a", is_whole, timeout_s=WAIT_S))
        with pytest.raises(NoRoomError, match="a has "):
            asyncio.run(pool.call("a", lambda model: pool.lease("b").__enter__()))
    with make(ModelPool(budget_bytes=250 * MB), a=100, b=100) as pool:
        use(pool, "b")
        with pool.lease("a"), pytest.raises(NoRoomError, match="this thread itself holds what"):
            pool.replace("b", lambda: tensor(100))


class Holder:
    """Refers to a tensor that others may use."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


@pytest.fixture
def holders() -> Iterator[ModelPool]:
    with ModelPool(budget_bytes=10 * MB, keep_alive=-1) as pool:
        for name in "abc":
            pool.add(name, lambda: Holder(tensor(4)))
        yield pool


def test_shared_storage_counts_once(holders: ModelPool) -> None:
    """Also when a model is loaded again."""
    shared = tensor(8)
    for name in "xy":
        holders.add(name, partial(Holder, shared))
    for _ in range(2):
        with holders.lease("x"), holders.lease("y"):
            assert loaded(holders) == ["x", "y"]
        holders.unload("y")
    assert holders.status()["x"].nbytes == 8 * MB


def test_what_callers_keep_of_an_unloaded_model_still_counts(holders: ModelPool) -> None:
    """Until they drop it, while a load waits."""
    kept = []
    for name in "ab":
        with holders.lease(name) as model:
            kept.append(model.tensor)
    with pytest.raises(NoRoomError, match=r"a has 4\.2 MB .*callers keep"), holders.lease("c", 0):
        pass
    threading.Timer(0.05, kept.clear).start()
    with holders.lease("c", WAIT_S):
        assert loaded(holders) == ["c"]


def test_growth_of_a_loaded_model_counts(holders: ModelPool) -> None:
    """After the lease that has changed it: status() does not walk the model."""
    use(holders, "a", "b")
    with holders.lease("a") as model:
        model.cache = tensor(3)
        assert holders.status()["a"].nbytes_by_device == {"host": 4 * MB}
    wait_for(lambda: holders.status()["a"].nbytes_by_device == {"host": 7 * MB})
    use(holders, "c")
    assert loaded(holders) == ["c"]


class Card:
    """A device of 100 MB, whose memory is the tensors that it made and those of other processes."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.others = 0

    def tensor(self, size_mb: int) -> Any:
        made = tensor(size_mb)
        self.made.append((StorageWeakRef(made.untyped_storage()), size_mb * MB))
        return made

    def snapshot(self) -> Any:
        used = sum(nbytes for one, nbytes in self.made if not one.expired())
        total, cache = 100 * MB, 1 * MB
        memory = DeviceMemory(used, used + cache, total - used - cache - self.others, total)
        return MemorySnapshot(devices={"host": memory})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(module, "memory_snapshot", card.snapshot)
    return card


def test_auto_budget_is_what_the_card_has(card: Card) -> None:
    """Free memory and torch's unused cache, without a tenth; other processes count."""
    with ModelPool(budget_bytes="auto", keep_alive=-1) as pool:
        make(pool, card.tensor, a=40, b=40, c=40, d=95)
        use(pool, "a", "b", "c")
        assert loaded(pool) == ["b", "c"]
        card.others = 20 * MB
        use(pool, "a")
        assert loaded(pool) == ["a"]
        card.others = 60 * MB
        for name in "bd":
            with pytest.raises(NoRoomError, match="host has room for"):
                pool.lease(name, 0).__enter__()
    card.others = 0
    with make(
        ModelPool(budget_bytes="auto", headroom_bytes=50 * MB), card.tensor, a=40, b=40
    ) as pool:
        use(pool, "a", "b")
        assert loaded(pool) == ["b"]


def test_auto_budget_waits_for_another_process(card: Card) -> None:
    """Until the time is up, whether or not the pool has other models."""

    def lend(timeout_s: float = WAIT_S) -> None:
        with pool.lease("a", timeout_s) as model:
            assert is_whole(model)

    def call() -> None:
        assert asyncio.run(pool.call("a", is_whole, timeout_s=WAIT_S))

    with make(ModelPool(budget_bytes="auto"), card.tensor, a=40, b=5) as pool:
        for ask, beside in ((lend, contextlib.nullcontext()), (call, pool.lease("b"))):
            card.others = 60 * MB
            with beside:
                for timeout_s in (0, 0.05):
                    began = time.monotonic()
                    with pytest.raises(NoRoomError, match="host has room for"):
                        lend(timeout_s)
                    assert time.monotonic() - began >= timeout_s
                threading.Timer(0.1, partial(setattr, card, "others", 0)).start()
                ask()
            pool.unload("a")


def test_pinned_model_is_not_evicted() -> None:
    """The error names it. A pinned model that found no room is loaded when there is room."""
    with make(ModelPool(max_loaded=1, keep_alive=-1), b=1, c=1) as pool:
        pool.add("a", partial(tensor, 1), keep_alive=-1)
        use(pool, "b", "c")  # The pool's own keep_alive pins nothing.
        assert loaded(pool) == ["c"]
        with pool.lease("c"), pytest.raises(NoRoomError, match=r"no room for a.* 1 open lease"):
            asyncio.run(pool.call("a", is_whole, timeout_s=SOON_S))
        wait_for(lambda: loaded(pool) == ["a"])
        for timeout_s in (None, WAIT_S):
            with pytest.raises(NoRoomError, match=r"a has .* \(pinned by keep_alive=-1\)"):
                pool.lease("b", timeout_s).__enter__()
        pool.unload("a")
        use(pool, "b")
        assert loaded(pool) == ["b"]


def test_memory_of_a_process_is_lent_when_the_card_has_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver needs a moment for it."""
    total, pids, polls, seen = 100 * MB, list[int](), list[int](), list[int]()

    def snapshot() -> Any:
        polls.extend(pid for pid in pids if not is_there(pid))
        free = total if len(polls) >= 5 else total - 60 * MB
        return MemorySnapshot(devices={"cuda:0": DeviceMemory(0, 0, free, total)})

    def load() -> Any:
        seen.append(len(polls))
        return tensor(1)

    monkeypatch.setattr(module, "memory_snapshot", snapshot)
    with ModelPool(budget_bytes={"cuda:0": total}) as pool:
        pool.add("a", hosted_models.Model, isolation="process", nbytes={"cuda:0": 60 * MB})
        pool.add("b", load, nbytes={"cuda:0": 60 * MB})
        with pool.lease("a") as model:
            pids.append(model.pid())
        use(pool, "b")
    assert seen == [5]


def test_removed_model_is_unloaded_and_forgotten() -> None:
    with make(ModelPool(max_loaded=1), a=1, b=1) as pool:
        with pytest.raises(ValueError, match="'a' already"):
            pool.add("a", partial(tensor, 1))
        with pool.lease("a"), pytest.raises(ModelInUseError, match="a has 1 open lease"):
            pool.remove("a")
        assert "a" in pool and pool.remove("a").freed_bytes == {"host": MB}
        with pytest.raises(UnknownModelError) as caught:
            pool.lease("a")
        assert str(caught.value) == "this pool has no model 'a'; it has: 'b'"
        with pytest.raises(TypeError, match="keepalive"):
            pool.add("a", Stub, keepalive="5m")
        assert "a" not in pool and list(pool.status()) == ["b"]
        make(pool, a=2)
        use(pool, "a", "b")


# Closing


def test_close_closes_all_models_newest_first() -> None:
    order: list[str] = []
    pool = ModelPool()
    for name in "abc":
        pool.add(name, partial(SimpleNamespace, close=partial(order.append, name))).load()
    lease = pool.lease("b")
    lease.__enter__()
    with pytest.raises(ModelInUseError, match="b has 1 open lease: "):
        pool.close(deadline_s=SOON_S)
    assert order == ["c", "a"]
    assert [s.state for s in pool.status().values()] == ["closed", "loaded", "closed"]
    with pytest.raises(ResourceClosedError):
        pool.add("d", partial(tensor, 1))
    with pytest.raises(ResourceClosedError):
        use(pool, "a")
    lease.__exit__(None, None, None)
    wait_for(lambda: pool.status()["b"].state == "closed")
    assert order == ["c", "a", "b"]


def test_close_ends_a_wait_for_room() -> None:
    pool = make(ModelPool(max_loaded=1), a=1, b=1)

    def close() -> None:
        wait_for(lambda: pool.status()["b"].state == "loading")
        pool.close(deadline_s=0)

    with pool.lease("a"):
        errors = errors_in_threads(pool.lease("b", timeout_s=WAIT_S).__enter__, close)
    assert [type(error) for error in errors] == [ResourceClosedError, ModelInUseError]


# Wrong use


@pytest.mark.parametrize("wrong", ["5", True, -1, float("nan"), float("inf")])
def test_wrong_timeouts_are_refused(wrong: Any) -> None:
    with make(ModelPool(), a=1) as pool:
        for function in (partial(pool.lease, "a"), partial(pool.alease, "a"), pool.close):
            with pytest.raises((TypeError, ValueError), match=r"(timeout|deadline)_s must be "):
                function(wrong)
