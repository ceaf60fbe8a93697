"""Tests of sleep and wake: `offload`, hosts and pools, with host memory as the device."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, call-arg, union-attr, index, operator"

import gc
import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support.programs import assert_clean, run_forked
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for
from torch_utils import ModelHost, ModelInUseError, ModelPool, NoRoomError, offload, release
from torch_utils.hosting import sleep

torch = pytest.importorskip("torch")
client = pytest.importorskip("prometheus_client")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from torch_utils.prometheus import register  # noqa: E402

MB = 1 << 20
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make host memory a device whose tensors are moved."""
    monkeypatch.setattr(sleep, "STAYING", {"meta"})


class Net(torch.nn.Module):  # type: ignore[name-defined]
    """A model with ties, views, containers, inner objects and an unnamed base."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(100).half())
        self.views = [self.table[:10], self.table.view(10, 10).t()]
        self.extra = {"x": (torch.randn(50), [torch.arange(7)])}
        self.base_is_unnamed = torch.randn(30)[3:9]
        self.lstm = torch.nn.LSTM(4, 4)
        with torch.inference_mode():
            self.inference = torch.randn(9)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)).sum() + self.lstm(torch.ones(1, 4))[0].sum()

    def tensors(self) -> list[Any]:
        extra = [self.extra["x"][0], *self.extra["x"][1], self.base_is_unnamed, self.inference]
        return [*self.state_dict(keep_vars=True).values(), *self.views, *extra]


class Memory:
    """The storages of tensors, by weak references."""

    def __init__(self, tensors: list[Any]) -> None:
        self.all = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def is_gone(self) -> bool:
        return all(one.expired() for one in self.all)

    def is_whole(self) -> bool:
        return not any(one.expired() for one in self.all)


def copies(net: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in net.tensors()]


def test_everything_of_a_model_moves_and_comes_back_equal() -> None:
    net = Net()
    memory = Memory(net.tensors())
    values, ids = copies(net), list(map(id, net.tensors()))
    offloaded = offload(net)
    assert memory.is_gone() and offloaded.left == ()
    assert sum(offloaded.nbytes.values()) <= offloaded.host_bytes
    asleep = Memory(net.tensors())
    for _ in range(2):
        assert list(map(id, net.tensors())) == ids
        assert all(map(torch.equal, net.tensors(), values))
        assert net.second.weight is net.first.weight
        assert net.views[0].data_ptr() == net.table.data_ptr() == net.views[1].data_ptr()
        assert net.views[1].stride() == (1, 10) and net.inference.is_inference()
        assert net.first.weight.requires_grad and not net.table.requires_grad
        offloaded.restore()
    assert asleep.is_gone() and not offloaded.restore()


def test_training_goes_on_after_a_nap() -> None:
    """The same program gives the same weights with and without naps, with hooks and gradients."""

    def train(naps: bool) -> tuple[list[Any], list[str]]:
        torch.manual_seed(0)
        net, called = Net(), []
        optimizer = torch.optim.Adam(net.parameters())
        net.first.weight.register_hook(lambda gradient: called.append("before"))
        net.first.weight.register_post_accumulate_grad_hook(lambda weight: called.append("after"))
        net.first.bias.register_hook(lambda gradient: called.append("never")).remove()
        for _ in range(3):
            net(torch.ones(2, 20)).backward()
            if naps:
                with offload(net, optimizer) as offloaded:
                    assert net.first.weight.grad is not None and offloaded.left == ()
            optimizer.step()
            optimizer.zero_grad()
        return copies(net), called

    (weights, called), (expected, expected_called) = train(True), train(False)
    assert all(map(torch.equal, weights, expected))
    assert called == expected_called == ["before", "after"] * 3


SHARES: dict[str, Callable[[Any], Any]] = {  # what else refers to a layer or its weight
    "list": lambda layer: [layer.weight],
    "model": torch.nn.Sequential,
    "closure": lambda layer: (lambda weight: lambda: weight)(layer.weight),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()),
    "view": lambda layer: layer.weight.detach()[:3],
    "gradient": lambda layer: layer.weight.grad,  # It stays beside its weight.
    "graph": lambda layer: (layer.weight * layer.weight).sum(),
    "array": lambda layer: layer.weight.detach().numpy(),
}


@pytest.mark.parametrize("share", SHARES)
def test_what_others_use_stays_where_it_is(share: str) -> None:
    """Also if the optimizer, which refers to the parameters, is passed too."""
    if share == "gradient" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip("C++ does not count as a user of the object")
    net = Net()
    net(torch.ones(2, 20)).backward()
    optimizer = torch.optim.SGD(net.parameters())
    other, gradient = SHARES[share](net.first), net.first.weight.grad
    shared, own = Memory([net.first.weight, gradient]), Memory([net.table, net.lstm.weight_ih_l0])
    address = net.first.weight.data_ptr()
    name, nbytes = ("Net.first", 3360) if share == "model" else ("Net.second.weight", 3200)
    del gradient
    with offload(net, optimizer) as offloaded:
        assert own.is_gone() and shared.is_whole()
        assert net.first.weight.data_ptr() == address
        assert {one.what.removesuffix(".grad") for one in offloaded.left} == {name}
        assert sum(one.nbytes for one in offloaded.left) == nbytes
    del other
    with offload(net, optimizer) as offloaded:
        assert shared.is_gone() and not offloaded.left


class Dispatching(torch.Tensor):  # type: ignore[name-defined]
    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise AssertionError("code of the program was run")


def with_compiled_call() -> Any:
    layer = torch.nn.Linear(2, 2)
    layer.compile(backend="eager")
    return layer


STUBBORN: dict[str, Callable[[], Any]] = {
    "script": lambda: torch.jit.script(torch.nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(torch.nn.Linear(2, 2), backend="eager"),
    "compiled call": with_compiled_call,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "sparse": lambda: torch.ones(3, 3).to_sparse(),
    "dispatching": lambda: torch.Tensor._make_subclass(Dispatching, torch.ones(3)),  # noqa: SLF001
}


QUICK = [kind for kind in STUBBORN if kind != "compiled"]


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*deprecated.*", "ignore:.*torch.jit.*")
@pytest.mark.parametrize("kind", [*QUICK, pytest.param("compiled", marks=pytest.mark.slow)])
def test_model_that_cannot_move_is_refused_and_unloads(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        made = Net()
        made.stubborn = STUBBORN[kind]()
        return made

    net = load()
    memory = Memory([net.table, net.first.weight])
    with pytest.raises(TypeError, match=r"cannot move .* Nothing was changed"):
        offload(net)
    assert memory.is_whole()
    with ModelHost(load, name="stubborn") as host:
        for _ in range(2):  # The log says it once.
            assert host.load() and not host.sleep() and host.status().state == "unloaded"
    (line,) = [one.getMessage() for one in caplog.records if "stubborn" in one.getMessage()]
    assert line.startswith("stubborn cannot sleep and is unloaded instead: offload() cannot move")


@pytest.fixture
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Allocations fail while a condition in this list holds."""
    make, conditions = torch.empty, list[Any]()

    def empty(*args: Any, **kwargs: Any) -> Any:
        if args[0] and any(condition() for condition in conditions):  # Not an empty tensor.
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    return conditions


def test_failure_to_wake_leaves_everything_asleep(out_of_memory: list[Any]) -> None:
    """Memory runs out in the middle of the storages."""
    net = Net()
    values = copies(net)
    offloaded = offload(net)
    asleep, calls = Memory(net.tensors()), itertools.count()
    out_of_memory.append(lambda: next(calls) % 3 == 2)
    with pytest.raises(torch.OutOfMemoryError):
        offloaded.restore()
    with pytest.raises(KeyError, match="mine"), offloaded:  # The error of the block wins.
        raise KeyError("mine")
    assert asleep.is_whole() and all(map(torch.equal, net.tensors(), values))
    out_of_memory.clear()
    assert offloaded.restore() and asleep.is_gone()
    assert all(map(torch.equal, net.tensors(), values))


def test_tensors_that_cannot_be_exchanged_leave_everything_as_it_was() -> None:
    """A weak reference in C++, as functorch has, is found at the last tensor."""
    net = Net()
    net.last = torch.ones(5)
    weak = torch._C._WeakTensorRef(net.last)  # noqa: SLF001
    memory = Memory(net.tensors())
    with pytest.raises(RuntimeError, match="weakref"):
        offload(net)
    assert memory.is_whole() and weak is not None
    net(torch.ones(2, 20)).backward()


def test_released_or_moved_while_offloaded() -> None:
    """What the program does to the tensors meanwhile stays."""
    net = Net()
    offloaded = offload(net)
    net.table.data = torch.ones(100).half()
    memory = Memory([net.lstm.weight_ih_l0])
    release(net.lstm)
    assert memory.is_gone()
    assert offloaded.restore()
    assert float(net.table.sum()) == 100


@pytest.mark.parametrize("keep_alive", ["20ms", 0])
def test_host_sleeps_when_it_is_idle_and_wakes_with_the_same_model(keep_alive: Any) -> None:
    """By the thread that waits for the end of its time, or by the end of its lease."""
    registry = client.CollectorRegistry()
    register(registry)
    with ModelHost(Net, keep_alive=keep_alive, idle="sleep") as host:
        with host.lease() as model:
            ids, values = list(map(id, model.tensors())), copies(model)
            memory = Memory(model.tensors())
            del model
        for _ in range(3):
            wait_for(lambda: host.status().state == "asleep")
            assert memory.is_gone() and not host.sleep()
            with host.lease() as model:
                assert host.status().state == "loaded"
                assert list(map(id, model.tensors())) == ids
                assert all(map(torch.equal, model.tensors(), values))
                with pytest.raises(ModelInUseError, match="1 open lease"):
                    host.sleep()
                del model
        wait_for(lambda: host.status().state == "asleep")
        status = host.status()
        assert (status.loads, status.unloads, status.expires_in_s) == (1, 0, None)
        value = partial(registry.get_sample_value, labels={"model": "Net"})
        assert (value("torch_utils_model_asleep"), value("torch_utils_model_loaded")) == (1, 0)
        labels = {"model": "Net", "device": "host"}
        nbytes = registry.get_sample_value("torch_utils_model_bytes", labels)
        assert nbytes == status.nbytes > 0
        host.unload()
        assert host.status().state == "unloaded" and not host.wake() and not host.sleep()


def test_unload_waits_for_the_streams_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the memory could be lent again while a side stream reads it."""
    were_whole = []
    with ModelHost(Net, keep_alive=-1) as host:
        with host.lease() as model:
            memory = Memory(model.tensors())
            del model
        wait = lambda device: were_whole.append(memory.is_whole())  # noqa: E731
        monkeypatch.setattr(torch.cpu, "synchronize", wait)
        host.unload()
    assert were_whole == [True] and memory.is_gone()


def test_many_naps_and_unloads_leave_nothing_behind() -> None:
    with ModelHost(lambda: torch.nn.Linear(30, 30), keep_alive=-1) as host:
        counts = []
        for index in range(61):
            assert host.load() and host.sleep() and host.wake()
            host.unload()
            if index % 20 == 0:
                gc.collect()
                counts.append(len(gc.get_objects()))  # without the frozen ones
        assert counts[-1] - counts[1] < 20


# Pools


def layer(mb: int, value: int = 0) -> Callable[[], Any]:
    return lambda: torch.nn.ParameterList([torch.full((mb * MB // 4,), float(value))])


def states(pool: ModelPool) -> str:
    return " ".join(f"{name}:{one.state}" for name, one in pool.status().items())


def test_evicted_models_sleep_within_their_budget() -> None:
    """The least recently used sleeper is unloaded first."""
    with ModelPool(budget_bytes=4 * MB, sleep_bytes=5 * MB) as pool:
        for name, mb in {"a": 2, "b": 3, "c": 4}.items():
            pool.add(name, layer(mb)).load()
        assert states(pool) == "a:asleep b:asleep c:loaded"
        with pool.lease("a"):
            pass
        assert states(pool) == "a:loaded b:unloaded c:asleep"
        assert [one.loads for one in pool.status().values()] == [1, 1, 1]


@pytest.mark.parametrize("sleep_bytes", [0, 3 * MB])
def test_eight_threads_share_a_budget_of_two_models(sleep_bytes: Any) -> None:
    with ModelPool(budget_bytes=2 * MB, sleep_bytes=sleep_bytes, keep_alive=-1) as pool:
        for index in range(4):
            pool.add(str(index), layer(1, index))

        def work(number: int) -> None:
            for turn in range(15):
                index = (number + turn * 3) % 4
                with pool.lease(str(index), timeout_s=WAIT_S) as model:
                    values = model[0].detach()
                    assert float(values[0]) == float(values[-1]) == index
                    assert sum(bool(one.leases) for one in pool.status().values()) <= 2
                    del model, values

        assert errors_in_threads(*[partial(work, n) for n in range(8)]) == []
        assert ("asleep" in states(pool)) == bool(sleep_bytes)


def test_pool_makes_room_when_memory_runs_out(out_of_memory: list[Any]) -> None:
    """A device may have less memory than the budget says: the idle models are evicted once."""
    with ModelPool(sleep_bytes="auto", keep_alive=-1) as pool:
        sleeper, other = pool.add("a", layer(1)), pool.add("b", layer(1))
        assert sleeper.load() and sleeper.sleep() and other.load()
        out_of_memory.append(lambda: other.status().state == "loaded")
        with other.lease(), pytest.raises(NoRoomError, match="no room to wake a"):
            sleeper.wake()
        assert states(pool) == "a:asleep b:loaded"
        with pool.lease("a"):
            assert states(pool) == "a:loaded b:asleep"
        assert sleeper.status().loads == 1


# Programs

PROGRAM = """
import asyncio, os, signal, sys, threading, time, torch, warnings
from torch_utils import ModelHost, exit_on_signals
from torch_utils.hosting import sleep
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
sleep.STAYING.discard("cpu")
exit_on_signals()
host = ModelHost(lambda: torch.nn.Linear(50, 50), idle="sleep", keep_alive=-1)
host.load()
"""

FORK = """
def use():
    return asyncio.run(host.call(lambda model: model.weight.numel()))
assert use() == 2500
host.sleep()
pid = os.fork()
if not pid:
    assert host.status().state == "unloaded"
    assert use() == 2500
    assert host.sleep() and host.wake()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert host.status().state == "asleep"  # So it is closed at exit.
"""
STORM = """
def nap():
    while host.sleep() is not None:
        host.wake()
threading.Thread(target=nap, daemon=True).start()
time.sleep(.2)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize(("program", "returncode"), [(FORK, 0), (STORM, 143)], ids=["fork", "nap"])
def test_program_ends_cleanly_in_every_state(program: str, returncode: int) -> None:
    assert_clean(run_forked(PROGRAM + program), returncode)


class Sleeper:
    """A model of another process, in which host memory is the device as well."""

    def __init__(self) -> None:
        sleep.STAYING.discard("cpu")
        self.weight = torch.arange(MB, dtype=torch.float32)
        self.memory = Memory([self.weight])

    def state(self) -> tuple[bool, float, int]:
        return self.memory.is_gone(), float(self.weight.sum()), os.getpid()


def test_model_in_a_process_sleeps_there() -> None:
    with ModelHost(Sleeper, isolation="process", keep_alive=-1) as host:
        with host.lease() as model:
            has_moved, total, pid = model.state()
        assert not has_moved and host.sleep() and host.status().state == "asleep"
        assert host.status().nbytes_by_device["host"] > 4 * MB
        with host.lease() as model:
            assert model.state() == (True, total, pid)
        assert host.sleep() and host.wake() and host.status().loads == 1
        assert host.sleep()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: host.status().state == "unloaded")
