"""Several models within a budget: who goes, who never does, and what is said when nobody can."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from programs import assert_clean, run_forked
from torch_utils import ModelInUseError, ModelPool, NoRoomError, ResourceClosedError
from torch_utils.hosting.core import Core
from torch_utils.hosting.tenants import Tenant

SOON_S = 0.2
WAIT_S = 60.0


class Sized(Tenant):
    """A model that says what it added."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.model = load()
        self.added_bytes = {"host": self.model.nbytes, "cuda:0": self.model.on_device}

    def _release(self) -> None:
        self.model.is_given_back = True


class Model:
    def __init__(self, nbytes: int, on_device: int = 0) -> None:
        self.nbytes, self.on_device, self.is_given_back = nbytes, on_device, False


@pytest.fixture(autouse=True)
def sizes_are_what_models_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_utils.hosting.host.ThreadTenant", Sized)


def make(pool: ModelPool, **sizes: Any) -> ModelPool:
    for name, size in sizes.items():
        size = size if isinstance(size, tuple) else (size,)
        pool.add(name, lambda size=size: Model(*size))
    return pool


def loaded(pool: ModelPool) -> list[str]:
    return [name for name, status in pool.status().items() if status.state == "loaded"]


def use(pool: ModelPool, *names: str) -> None:
    for name in names:
        with pool.lease(name) as model:
            assert not model.is_given_back


def test_least_recently_used_goes_first() -> None:
    """By when a lease ended, not by when it was loaded."""
    with make(ModelPool(budget_bytes=250), a=100, b=100, c=100) as pool:
        use(pool, "a", "b", "a", "c")
        assert loaded(pool) == ["a", "c"]
        assert pool.status()["b"].unloads == 1


def test_count_of_models() -> None:
    """Whatever they take."""
    with make(ModelPool(max_loaded=2), a=1, b=1, c=1) as pool:
        use(pool, "a", "b", "c")
        assert loaded(pool) == ["b", "c"]


def test_budget_by_device() -> None:
    """The host's and each device's apart; what is not named has no limit."""
    pool = make(ModelPool(budget_bytes={"cuda:0": 10}), a=(1 << 40, 6), b=(1 << 40, 6), c=(0, 4))
    with pool:
        use(pool, "a", "c")
        assert loaded(pool) == ["a", "c"]
        use(pool, "b")
        assert loaded(pool) == ["b", "c"]


def test_lent_one_stays_and_is_named() -> None:
    """Also against a model whose size is not known before it is there."""
    with make(ModelPool(budget_bytes=250), a=100, b=100, c=100) as pool:
        for _ in range(2):  # The second time its size is known.
            with pool.lease("a") as a, pool.lease("b") as b:
                with pytest.raises(NoRoomError) as caught, pool.lease("c", timeout_s=SOON_S):
                    pass
                assert not a.is_given_back
                assert not b.is_given_back
            text = str(caught.value)
            assert "no room for c" in text
            assert "250 B" in text
            assert text.count(__file__) == 2
            assert "a has 100 B" in text


def test_waits_until_a_lease_ends() -> None:
    """In a thread and in a coroutine; then the other one goes."""
    pool = make(ModelPool(budget_bytes=100), a=100, b=100)
    entered = threading.Event()

    def other() -> None:
        with pool.lease("b", timeout_s=WAIT_S):
            entered.set()

    async def coroutine() -> None:
        async with pool.alease("a"):
            pending = asyncio.create_task(in_a_task())
            await asyncio.sleep(SOON_S)
            assert not pending.done()
        await pending

    async def in_a_task() -> None:
        async with pool.alease("b", timeout_s=WAIT_S) as model:
            assert not model.is_given_back

    with pool:
        thread = threading.Thread(target=other)
        with pool.lease("a"):
            thread.start()
            assert not entered.wait(SOON_S)
        assert entered.wait(WAIT_S)
        thread.join()
        asyncio.run(coroutine())
        assert loaded(pool) == ["b"]


def test_one_that_can_never_fit_costs_nobody_his_place() -> None:
    """Once its size is known, it is refused at once, without a load."""
    loads = []

    def load() -> Model:
        loads.append(1)
        return Model(300)

    with make(ModelPool(budget_bytes=250), a=100, b=100) as pool:
        pool.add("big", load)
        use(pool, "a", "b")
        for _ in range(2):
            with pytest.raises(NoRoomError, match="it needs 300 B"), pool.lease("big"):
                pass
        assert loaded(pool) == ["a", "b"]
        assert loads == [1]


def test_thread_that_holds_all_waits_for_nobody() -> None:
    """It would wait for itself for ever."""
    with make(ModelPool(max_loaded=1), a=1, b=1) as pool, pool.lease("a"):
        with pytest.raises(NoRoomError, match="a has 1 B"), pool.lease("b"):
            pass


def test_others_have_their_own_time() -> None:
    """One who gives up early does not end the wait of one who has more time."""
    pool = make(ModelPool(max_loaded=1), a=1, b=1)
    outcome: list[str] = []

    def wait(timeout_s: float) -> None:
        try:
            with pool.lease("b", timeout_s=timeout_s):
                outcome.append("lent")
        except NoRoomError:
            outcome.append("no room")

    with pool:
        threads = [threading.Thread(target=wait, args=(s,)) for s in (SOON_S, WAIT_S)]
        with pool.lease("a"):
            for thread in threads:
                thread.start()
            threads[0].join()
            assert outcome == ["no room"]
        threads[1].join()
        assert outcome == ["no room", "lent"]


def test_two_loads_at_once_share_the_room() -> None:
    """Neither waits for what the other has not got yet."""
    barrier = threading.Barrier(2, timeout=WAIT_S)
    with make(ModelPool(budget_bytes=100), a=100, b=100) as pool:
        use(pool, "a", "b")

        def ask(name: str) -> None:
            for _ in range(50):
                barrier.wait()
                with pool.lease(name, timeout_s=WAIT_S) as model:
                    assert not model.is_given_back
                    assert len(loaded(pool)) <= 1

        failed: list[BaseException] = []

        def run(name: str) -> None:
            try:
                ask(name)
            except BaseException as error:
                failed.append(error)
                barrier.abort()

        threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def test_failed_load_takes_no_room() -> None:
    """And what was unloaded for it can come back."""

    def fail() -> Model:
        raise OSError("no such file")

    with make(ModelPool(max_loaded=1), a=1) as pool:
        pool.add("broken", fail)
        use(pool, "a")
        with pytest.raises(OSError, match="no such file"), pool.lease("broken"):
            pass
        use(pool, "a")
        assert pool.status()["broken"].last_error is not None


def test_closing_closes_all_hosts() -> None:
    """Newest first; one that is lent is named, after the others were closed."""
    order: list[str] = []
    pool = make(ModelPool(), a=1, b=1, c=1)
    for name, host in pool._hosts.items():
        close = host.close
        host.close = lambda s=None, n=name, c=close: (order.append(n), c(s))[1]  # type: ignore[method-assign,misc]
    use(pool, "a", "b", "c")
    lease = pool.lease("b")
    lease.__enter__()
    with pytest.raises(ModelInUseError, match="b is lent"):
        pool.close(deadline_s=SOON_S)
    assert order == ["c", "b", "a"]
    assert [s.state for s in pool.status().values()] == ["closed", "loaded", "closed"]
    with pytest.raises(ResourceClosedError):
        pool.add("d", lambda: Model(1))
    with pytest.raises(ResourceClosedError), pool.lease("a"):
        pass
    lease.__exit__(None, None, None)
    assert pool.status()["b"].state == "closed"


def test_closing_lends_nothing_and_has_one_deadline() -> None:
    """While it waits for the leases of one, the others are closed too; and it waits once."""
    pool = make(ModelPool(), a=1, b=1, c=1)
    given: list[float] = []
    said: list[str] = []

    def close_in_vain() -> None:
        with pytest.raises(ModelInUseError, match=r"c is lent 1 time: .*; b is lent 1 time: "):
            pool.close(SOON_S)
        said.append("both")

    for host in pool._hosts.values():
        close = host.close
        host.close = lambda s, c=close: (given.append(s), c(s))[1]  # type: ignore[method-assign,misc]
    with pool.lease("b"), pool.lease("c"):
        thread = threading.Thread(target=close_in_vain)
        thread.start()
        while not given:
            time.sleep(0.001)
        with pytest.raises(ResourceClosedError), pool.lease("a"):
            pass
        thread.join()
    assert said == ["both"]
    assert given[0] <= SOON_S
    assert given[1:] == [0, 0]


@pytest.mark.parametrize("wrong", ["5", True, float("nan")])
def test_wrong_times_are_refused_at_once(wrong: Any) -> None:
    """Before anything is waited for, or closed."""
    with make(ModelPool(), a=1) as pool:
        for ask in (partial(pool.lease, "a"), partial(pool.alease, "a")):
            with pytest.raises((TypeError, ValueError), match="timeout_s must be a number"):
                ask(wrong)
        with pytest.raises((TypeError, ValueError), match="deadline_s must be a number"):
            pool.close(wrong)
        use(pool, "a")


def test_lease_is_no_model() -> None:
    """Whoever forgets the block is told."""
    with make(ModelPool(), a=1) as pool, pytest.raises(AttributeError, match=r"with .* as model"):
        pool.lease("a").encode("text")  # type: ignore[attr-defined]


def test_closing_ends_a_wait_for_room() -> None:
    """Whoever waits hears that it is closed, and not only when a lease ends."""
    pool = make(ModelPool(max_loaded=1), a=1, b=1)
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            with pool.lease("b", timeout_s=WAIT_S):
                pass
        except Exception as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    with pool.lease("a"):
        thread.start()
        while pool.status()["b"].state != "loading":
            time.sleep(0.01)
        with pytest.raises(ModelInUseError):
            pool.close(deadline_s=0)
        thread.join()
    assert [type(error) for error in heard] == [ResourceClosedError]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"budget_bytes": 0}, ValueError, "budget_bytes must be positive"),
        ({"budget_bytes": 1.5}, TypeError, "whole number"),
        ({"budget_bytes": {"host": -1}}, ValueError, "host"),
        ({"budget_bytes": {"cuda": 1}}, ValueError, "cuda:0"),
        ({"budget_bytes": {"hots": 1}}, ValueError, "hots"),
        ({"budget_bytes": {}}, ValueError, "budget_bytes"),
        ({"max_loaded": True}, TypeError, "max_loaded"),
        ({"keep_alive": "soon"}, ValueError, "keep_alive"),
    ],
)
def test_wrong_limits(options: dict[str, Any], error: type[Exception], says: str) -> None:
    """Refused when the pool is made."""
    with pytest.raises(error, match=says):
        ModelPool(**options)


def test_wrong_names() -> None:
    """Unknown: which there are. Twice: which. Wrong options: before anything is added."""
    with make(ModelPool(), a=1) as pool:
        with pytest.raises(KeyError, match="no model 'b'; it has: 'a'"):
            pool.lease("b")
        with pytest.raises(ValueError, match="'a' already"):
            pool.add("a", lambda: Model(1))
        with pytest.raises(TypeError):
            pool.add("b", lambda: Model(1), keepalive="5m")
        assert list(pool.status()) == ["a"]


def test_fork_while_somebody_takes_room() -> None:
    """The child's pool waits for no thread of its parent."""
    done = run_forked(
        """
        import os, signal, threading, warnings
        from torch_utils import ModelPool

        warnings.filterwarnings("ignore", message=".*multi-threaded")  # From Python 3.12 on.

        pool = ModelPool(max_loaded=1)
        pool.add("a", object)
        held, go_on = threading.Event(), threading.Event()

        def take():
            with pool._room._lock:
                held.set()
                go_on.wait()

        thread = threading.Thread(target=take)
        thread.start()
        held.wait()
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            with pool.lease("a"):
                os._exit(0)
        print(os.waitpid(pid, 0)[1])
        go_on.set()
        thread.join()
        pool.close()
        """
    )
    assert_clean(done)
    assert done.stdout == "0\n"


def test_core_is_not_told_of_a_wait_that_is_over() -> None:
    """What waits for a change of a host is forgotten when it has been woken."""
    pool = make(ModelPool(max_loaded=1), a=1, b=1)
    with pool:
        use(pool, *("ab" * 20))
        cores: list[Core] = [host.core for host in pool._hosts.values()]
        assert all(len(core._waiters) < 20 for core in cores)
