"""thorough=True: each cache is cleared where it is in use, and nothing else is touched."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from programs import assert_clean, run_forked
from torch_utils import release
from torch_utils._releasing.other_caches import clear_other_caches


def stand_in(initialized: bool, log: list[str]) -> Any:
    def note(name: str) -> Any:
        return lambda *args: log.append(name)

    plans = [types.SimpleNamespace(clear=note(f"plans {index}")) for index in range(2)]
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_initialized=lambda: initialized, device_count=lambda: 2, ipc_collect=note("ipc")
        ),
        _C=types.SimpleNamespace(
            _cuda_clearCublasWorkspaces=note("cublas"), _cuda_hasPrimaryContext=lambda index: False
        ),
        backends=types.SimpleNamespace(cuda=types.SimpleNamespace(cufft_plan_cache=plans)),
        accelerator=types.SimpleNamespace(empty_host_cache=note("pinned")),
    )


@pytest.fixture
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)


def test_on_a_device(monkeypatch: pytest.MonkeyPatch, no_dynamo: None) -> None:
    """All of it, once CUDA is in use."""
    log: list[str] = []
    monkeypatch.setitem(sys.modules, "torch", stand_in(True, log))
    cleared = clear_other_caches()
    assert log == ["cublas", "plans 0", "plans 1", "ipc", "pinned"]
    assert cleared == ["cuBLAS workspaces", "cuFFT plans", "IPC handles", "pinned host memory"]


def test_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch, no_dynamo: None) -> None:
    """Before CUDA is in use none of its calls is made."""
    log: list[str] = []
    monkeypatch.setitem(sys.modules, "torch", stand_in(False, log))
    assert clear_other_caches() == []
    assert log == []


def test_nothing_during_a_capture(monkeypatch: pytest.MonkeyPatch, no_dynamo: None) -> None:
    """Page-locked memory and plans that are given back would spoil the CUDA graph."""
    log: list[str] = []
    torch = stand_in(True, log)
    torch._C._cuda_hasPrimaryContext = lambda index: index == 1
    torch.cuda.device = lambda index: contextlib.nullcontext(log.append(f"enter {index}"))
    torch.cuda.is_current_stream_capturing = lambda: log[-1] == "enter 1"
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert clear_other_caches() == []
    assert set(log) == {"enter 1"}


def test_missing_call_skips_nothing_else(monkeypatch: pytest.MonkeyPatch, no_dynamo: None) -> None:
    """A torch without one of the calls has the others made."""
    log: list[str] = []
    torch = stand_in(True, log)
    del torch._C._cuda_clearCublasWorkspaces, torch.accelerator
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert clear_other_caches() == ["cuFFT plans", "IPC handles"]


def test_pinned_cache_of_an_older_torch(monkeypatch: pytest.MonkeyPatch, no_dynamo: None) -> None:
    """Before the public call there was a private one, which does the same."""
    log: list[str] = []
    torch = stand_in(True, log)
    del torch.accelerator.empty_host_cache
    torch._C._host_emptyCache = lambda: log.append("pinned, privately")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert "pinned host memory" in clear_other_caches()
    assert log[-1] == "pinned, privately"


def test_workspaces_stay_beside_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch, no_dynamo: None
) -> None:
    """A graph replays with the workspace it was captured with, and nothing else keeps that."""

    class CUDAGraph:
        pass

    class Own(CUDAGraph):
        pass

    log: list[str] = []
    torch = stand_in(True, log)
    torch.cuda.CUDAGraph = CUDAGraph
    monkeypatch.setitem(sys.modules, "torch", torch)
    for kind in (CUDAGraph, Own):
        graph = kind()
        assert "cuBLAS workspaces" not in clear_other_caches()
        assert "cublas" not in log
        del graph
    assert "cuBLAS workspaces" in clear_other_caches()
    assert log.count("cublas") == 1


def test_a_cuda_graph_in_a_cycle_is_collected(
    monkeypatch: pytest.MonkeyPatch, no_dynamo: None
) -> None:
    """One that is garbage keeps the workspaces no longer, nor its pool."""

    class CUDAGraph:
        pass

    log: list[str] = []
    torch = stand_in(True, log)
    torch.cuda.CUDAGraph = CUDAGraph
    monkeypatch.setitem(sys.modules, "torch", torch)
    with_collector = gc.isenabled()
    gc.disable()
    try:
        graph: Any = CUDAGraph()
        graph.me = graph
        del graph
        assert "cuBLAS workspaces" in clear_other_caches()
    finally:
        if with_collector:
            gc.enable()


def test_dynamo_is_reset_only_if_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not imported for the purpose, which would take most of a second."""
    log: list[str] = []
    dynamo = types.SimpleNamespace(reset=lambda: log.append("reset"))
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    assert "compiled code" in clear_other_caches()
    assert log == ["reset"]
    assert_clean(
        run_forked("""
        import sys, torch
        from torch_utils import release
        release(torch.ones(3), thorough=True)
        assert "torch._dynamo" not in sys.modules
        """)
    )


def test_graphs_of_compiled_code_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that dynamo has let go of in cycles do not keep the workspaces, nor their pools."""

    class CUDAGraph:
        pass

    kept: list[Any] = []

    def reset() -> None:
        node: Any = kept.pop()
        node.me = node

    log: list[str] = []
    torch = stand_in(True, log)
    torch.cuda.CUDAGraph = CUDAGraph
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.SimpleNamespace(reset=reset))
    kept.append(CUDAGraph())
    with_collector = gc.isenabled()
    gc.disable()
    try:
        assert "cuBLAS workspaces" in clear_other_caches()
    finally:
        if with_collector:
            gc.enable()


def test_frozen_cycle_is_collected() -> None:
    """Only thorough gets at a cycle that was frozen before it was dropped."""
    program = """
    import gc, torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch_utils import release
    class Holder: pass
    holder = Holder(); holder.me = holder; holder.tensor = torch.ones(1000)
    storage = StorageWeakRef(holder.tensor.untyped_storage())
    gc.freeze(); del holder
    frozen = gc.get_freeze_count()
    assert release([], collect="full") and not storage.expired()
    assert release([], thorough=True) and storage.expired()
    assert gc.get_freeze_count() > 0.9 * frozen
    """
    assert_clean(run_forked(program))


@pytest.mark.slow
def test_compiled_module() -> None:
    """A compiled module gives its weights back, and says that it was released."""
    model = torch.nn.Linear(32, 32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(torch.ones(1, 32))
    weight = StorageWeakRef(model.weight.untyped_storage())
    release(compiled, thorough=True)
    gc.collect()
    assert weight.expired()
    with pytest.raises(Exception, match="was released"):
        compiled(torch.ones(1, 32))
    with pytest.raises(Exception, match="was released"):
        model(torch.ones(1, 32))
