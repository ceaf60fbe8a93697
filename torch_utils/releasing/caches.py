"""What torch keeps outside its allocators, and `empty_cache` does not give back.

Each step asks first whether there is anything: a module that the program has not loaded, and a
device that it has not initialised, stay as they are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from torch_utils._runtime import DEBUG, has_frozen, loaded_torch, log
from torch_utils.memory import captures_graph
from torch_utils.releasing.internals import private
from torch_utils.releasing.objects import instances_of


def _reset_dynamo(torch: Any) -> bool:
    """Compiled code keeps its guards and, through them, models; importing it costs 0.8 s."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or getattr(getattr(dynamo, "__spec__", None), "_initializing", False):
        return False
    dynamo.reset()
    return True


def _unfreeze(torch: Any) -> bool:
    """A cycle that `gc.freeze` has put aside is not collected until it is taken back."""
    if not has_frozen():
        return False
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return True


def _clear_cublas_workspaces(torch: Any) -> bool:
    """About 8.5 MB (32 MiB on Hopper) for each handle and stream.

    A CUDA graph remembers the address of the workspace that its stream had when it was captured,
    and nothing keeps that workspace but torch's own map: cleared, a replay would write to what
    somebody else has by then. So while there may be a graph, they stay.
    """
    if _may_have_graphs(torch):
        gc.collect()  # Some may be in cycles, such as those of compiled code; each has a pool, too.
    if _may_have_graphs(torch):
        log(DEBUG, "cuBLAS workspaces stay: a CUDA graph may have been captured with them")
        return False
    clear = private(torch, "_C._cuda_clearCublasWorkspaces")
    return clear is not None and clear() is None


def _may_have_graphs(torch: Any) -> bool:
    """Look for a CUDA graph in the heap; objects that `gc.freeze` put aside cannot be seen."""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    if kind is None:
        return False
    return has_frozen() or bool(instances_of(kind))


def _clear_fft_plans(torch: Any) -> bool:
    """cuFFT's plans hold work areas on the device."""
    for index in range(torch.cuda.device_count()):
        torch.backends.cuda.cufft_plan_cache[index].clear()
    return True


def _collect_ipc(torch: Any) -> bool:
    """Handles of tensors that other processes have closed; it would initialise CUDA."""
    torch.cuda.ipc_collect()
    return True


def _empty_pinned_cache(torch: Any) -> bool:
    """Page-locked host memory, kept for the next copy.

    The public call came with torch 2.13. What `torch.cuda.graph` itself calls is older.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or private(torch, "_C._host_emptyCache")
    return empty is not None and empty() is None


def _if_cuda_is_in_use(step: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Take a step only once the program has initialised CUDA, which the step itself might do.

    Nor while this thread captures a CUDA graph: to give memory back would spoil it.
    """

    def checked(torch: Any) -> bool:
        return bool(torch.cuda.is_initialized()) and not captures_graph(torch) and step(torch)

    return checked


STEPS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("compiled code", _reset_dynamo),
    ("frozen cycles", _unfreeze),
    ("cuBLAS workspaces", _if_cuda_is_in_use(_clear_cublas_workspaces)),
    ("cuFFT plans", _if_cuda_is_in_use(_clear_fft_plans)),
    ("IPC handles", _if_cuda_is_in_use(_collect_ipc)),
    ("pinned host memory", _if_cuda_is_in_use(_empty_pinned_cache)),
)


def clear_caches_of_torch() -> list[str]:
    """Clear each of them where there is something to clear; never raises.

    Returns:
        The names of what was cleared.
    """
    torch = loaded_torch()
    cleared: list[str] = []
    for name, step in STEPS if torch is not None else ():
        try:
            if step(torch):
                cleared.append(name)
        except Exception as error:
            # Private calls that this version of torch lacks, devices in an error state: one
            # step must not keep the others from being taken.
            log(DEBUG, "%s not cleared: %r", name, error)
    return cleared
