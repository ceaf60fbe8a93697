"""The checks: right in ordinary use, and False instead of an error everywhere else."""

from __future__ import annotations

import mmap
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from programs import assert_clean, run, run_forked
from torch_utils import (
    get_device_info,
    get_optimal_device,
    is_cuda_available,
    memory_snapshot,
    safe_cuda_empty_cache,
)
from torch_utils.devices import initialized_memory


def stand_in(**cuda: Any) -> types.SimpleNamespace:
    """A torch with two CUDA devices, the second of which has no context."""
    visited: list[str] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            visited.append(f"enter {self.index}")

        def __exit__(self, *error: object) -> None:
            visited.append(f"exit {self.index}")

    defaults: dict[str, Any] = dict(  # noqa: C408  (names, as they are torch's)
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        get_device_name=lambda index: f"stand-in {index}",
        memory_allocated=lambda index: 10,
        memory_reserved=lambda index: [20, 0][index],
        mem_get_info=lambda index: (70, 100),
        device=Guard,
        empty_cache=lambda: visited.append("empty"),
    )
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(**{**defaults, **cuda}),
        version=types.SimpleNamespace(cuda="13.0"),
        backends=types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False)),
        __version__="9.9",
        visited=visited,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    torch = stand_in()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_memory_is_read_at_once(fake: types.SimpleNamespace) -> None:
    """Sorting all counters for one of them takes most of a millisecond, twice for each release."""
    counters = {
        f"{n}_bytes": {"all": {"current": v}} for n, v in (("allocated", 3), ("reserved", 4))
    }
    fake.cuda.memory_stats_as_nested_dict = lambda index: counters
    del fake.cuda.memory_allocated
    fake._C = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index == 1)
    assert initialized_memory() == {
        "cuda:1": {"allocated_bytes": 3, "reserved_bytes": 4, "free_bytes": 70, "total_bytes": 100}
    }


def test_with_a_device(fake: types.SimpleNamespace) -> None:
    """The answers about a machine with CUDA, and memory only where there is a context."""
    assert is_cuda_available() is True
    assert get_optimal_device() == "cuda"
    assert get_optimal_device(force_cpu=True) == "cpu"
    info = get_device_info()
    assert (info["backend"], info["device_count"], info["current_device"]) == ("cuda", 2, 0)
    assert info["device_name"] == "stand-in 0"
    assert list(info["memory"]) == ["cuda:0"]
    assert info["memory"]["cuda:0"]["reserved_bytes"] == 20
    snapshot = memory_snapshot()
    assert snapshot.devices["cuda:0"].free_bytes == 70
    assert (snapshot - snapshot).devices["cuda:0"].free_bytes == 0


def test_empty_cache_visits_only_devices_in_use(fake: types.SimpleNamespace) -> None:
    """One device has a context: it is emptied inside its guard, the other is left alone."""
    assert safe_cuda_empty_cache() is True
    assert fake.visited == ["enter 0", "empty", "exit 0"]


def test_empty_cache_asks_for_contexts_where_it_can(fake: types.SimpleNamespace) -> None:
    """torch's own answer about contexts goes before the guess from reserved memory."""
    fake._C = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index == 1)
    assert safe_cuda_empty_cache() is True
    assert fake.visited == ["enter 1", "empty", "exit 1"]


def test_empty_cache_leaves_a_capture_alone(fake: types.SimpleNamespace) -> None:
    """Memory given back while a CUDA graph is captured would spoil the graph."""
    fake.cuda.is_current_stream_capturing = lambda: fake.visited[-1] == "enter 0"
    assert safe_cuda_empty_cache() is False
    assert fake.visited == ["enter 0", "exit 0"]


def test_uninitialised_cuda_is_not_touched(fake: types.SimpleNamespace) -> None:
    """Before the program uses CUDA, nothing but is_initialized is asked."""

    def forbidden(*args: object) -> None:
        raise AssertionError("this would create a context")

    fake.cuda.is_initialized = lambda: False
    for name in ("empty_cache", "device", "mem_get_info", "memory_reserved", "current_device"):
        setattr(fake.cuda, name, forbidden)
    assert safe_cuda_empty_cache() is False
    assert memory_snapshot().devices == {}
    assert get_device_info()["current_device"] is None


def test_check_does_not_poison_a_later_fork(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is asked in the way that asks NVML, and the environment is never changed."""
    asked: list[str] = []
    fake.cuda.is_available = lambda: bool(asked.append("is_available"))
    fake.cuda.device_count = lambda: asked.append("device_count") or 2

    class Environment(dict[str, str]):
        def __setitem__(self, name: str, value: str) -> None:
            raise AssertionError("other threads would see this")

    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", Environment())
        assert is_cuda_available()
    assert asked == ["device_count"]


def test_the_programs_choice_of_check_stands(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the program has set torch's variable, torch is asked as it says."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    fake.cuda.is_available = lambda: False
    assert is_cuda_available() is False


def raising(*args: object) -> Any:
    raise RuntimeError("driver trouble")


BROKEN: dict[str, Any] = {
    "blocked": None,
    "empty": types.ModuleType("torch"),
    "cuda is None": types.SimpleNamespace(cuda=None, __version__="1"),
    "raising": stand_in(is_available=raising, is_initialized=raising, device_count=raising),
    "half failing": stand_in(mem_get_info=raising, device=raising, get_device_name=raising),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """No installation, however broken, makes a check raise."""
    monkeypatch.setitem(sys.modules, "torch", BROKEN[kind])
    expected = kind == "half failing"
    assert is_cuda_available() is expected
    assert get_optimal_device() == ("cuda" if expected else "cpu")
    assert get_device_info()["cuda_available"] is expected
    assert safe_cuda_empty_cache() is False
    assert memory_snapshot().devices == {}


def test_half_imported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose import is still running counts as missing."""
    torch = stand_in()
    torch.__spec__ = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert is_cuda_available() is False


def test_this_machine() -> None:
    """Real torch: consistent with what torch itself says."""
    assert is_cuda_available() == torch.cuda.is_available()
    info = get_device_info()
    assert info["torch_version"] == torch.__version__
    assert info["backend"] == get_optimal_device()


def test_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend hides another: without CUDA, XPU and then MPS are found."""
    fake = stand_in(device_count=lambda: 0, is_initialized=lambda: False)
    fake.xpu = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert get_optimal_device() == "xpu"
    del fake.xpu
    fake.backends.mps.is_available = lambda: True
    fake.mps = types.SimpleNamespace(
        driver_allocated_memory=lambda: 50,
        current_allocated_memory=lambda: 40,
        recommended_max_memory=lambda: 100,
        device_count=lambda: 1,
    )
    assert get_optimal_device() == "mps"
    assert memory_snapshot().devices["mps:0"].reserved_bytes == 50


def test_host_memory_is_that_of_the_system() -> None:
    """The figures agree with /proc/self/status, anonymous and file-backed apart."""
    # Not by malloc, which may give what was resident before.
    block = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(64 << 20))
    host = memory_snapshot().host
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kb = {key: int(value.split()[0]) * 1024 for key, value in status.items() if "kB" in value}
    assert host.rss_bytes == pytest.approx(kb["VmRSS"], rel=0.05)
    assert host.anonymous_bytes == pytest.approx(kb["RssAnon"], rel=0.05)
    block.close()
    freed = host - memory_snapshot().host
    assert freed.anonymous_bytes == pytest.approx(64 << 20, rel=0.1)


def test_without_torch_nothing_is_imported() -> None:
    """What cleans up asks only for a torch that is there already."""
    program = """
    import sys
    sys.modules["torch"] = None
    import torch_utils as t
    assert not t.is_cuda_available() and t.get_optimal_device() == "cpu"
    assert not t.safe_cuda_empty_cache() and not t.get_device_info()["cuda_available"]
    with t.SafePyTorchCleanup() as scope:
        scope.manage(open("/dev/null"))
    assert scope.report.errors == ()
    """
    assert_clean(run(program))


def test_checks_at_exit_do_not_import() -> None:
    """Asked from an atexit callback for the first time, torch is not imported."""
    program = """
    import atexit, sys
    def late():
        assert torch_utils.is_shutting_down()
        assert not torch_utils.is_cuda_available()
        assert torch_utils.get_optimal_device() == "cpu"
        assert "torch" not in sys.modules
        print("asked")
    atexit.register(late)  # Before the library: so it runs after the library's own callback.
    import torch_utils
    assert not torch_utils.is_shutting_down()
    """
    result = run(program)
    assert_clean(result)
    assert result.stdout == "asked\n"


def test_checks_in_every_phase() -> None:
    """From a destructor that runs when this package's own modules are gone, too."""
    program = """
    import sys
    import torch
    import torch_utils
    class Last:
        def __del__(self, t=torch_utils, checks=(
            torch_utils.is_shutting_down, torch_utils.is_cuda_available,
            torch_utils.get_optimal_device, torch_utils.get_device_info,
            torch_utils.safe_cuda_empty_cache, torch_utils.memory_snapshot,
            torch_utils.release,
        ), clean=torch_utils.safe_tensor_cleanup, write=sys.__stdout__.write,
           flush=sys.__stdout__.flush):
            self.x = [1]
            answers = [check() for check in checks]
            write(f"{answers[:3]} {clean('x', self)}\\n"); flush()
    sys.kept = Last()
    torch.kept = Last()
    torch_utils.resource.kept = Last()
    """
    result = run_forked(program)
    assert_clean(result)
    assert result.stdout == "[True, False, 'cpu'] True\n" * 3
