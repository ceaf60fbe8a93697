"""Clear what torch keeps outside its allocators, which `empty_cache` does not return.

No step imports a module or initialises a device that the program does not use.
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
    """Reset compiled code, whose guards keep models alive. Importing torch._dynamo takes 0.8 s."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or getattr(getattr(dynamo, "__spec__", None), "_initializing", False):
        return False
    dynamo.reset()
    return True


def _unfreeze(torch: Any) -> bool:
    """Collect cycles that `gc.freeze` has excluded from collections."""
    if not has_frozen():
        return False
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return True


def _clear_cublas_workspaces(torch: Any) -> bool:
    """Clear cuBLAS's workspaces: about 8.5 MB (32 MiB on Hopper) for each handle and stream.

    A CUDA graph keeps the address of its stream's workspace, but not the workspace itself. After
    clearing, a replay would write to memory of others. So the workspaces stay while a graph may
    exist.
    """
    if _may_have_graphs(torch):
        gc.collect()  # Graphs of compiled code may be in cycles.
    if _may_have_graphs(torch):
        log(DEBUG, "cuBLAS workspaces not cleared: a CUDA graph may use them")
        return False
    clear = private(torch, "_C._cuda_clearCublasWorkspaces")
    return clear is not None and clear() is None


def _may_have_graphs(torch: Any) -> bool:
    """Return whether a CUDA graph may exist. `gc.freeze` hides objects from the search."""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    if kind is None:
        return False
    return has_frozen() or bool(instances_of(kind))


def _clear_fft_plans(torch: Any) -> bool:
    """Clear cuFFT's plans, which hold work areas on the device."""
    for index in range(torch.cuda.device_count()):
        torch.backends.cuda.cufft_plan_cache[index].clear()
    return True


def _collect_ipc(torch: Any) -> bool:
    """Free tensors that other processes have closed. This initialises CUDA."""
    torch.cuda.ipc_collect()
    return True


def _empty_pinned_cache(torch: Any) -> bool:
    """Free page-locked host memory that torch keeps for the next copy.

    The public function exists from torch 2.13 on; `torch.cuda.graph` calls the older private one.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or private(torch, "_C._host_emptyCache")
    return empty is not None and empty() is None


def _if_cuda_is_in_use(step: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Restrict a step to programs that use CUDA, and to times without a capture.

    The step itself might initialise CUDA, and it would break the capture of a CUDA graph.
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
    """Run all steps. Never raises.

    Returns:
        The names of the steps that cleared something.
    """
    torch = loaded_torch()
    cleared: list[str] = []
    for name, step in STEPS if torch is not None else ():
        try:
            if step(torch):
                cleared.append(name)
        except Exception as error:
            # This torch may lack a private function, or a device may be in an error state. The
            # other steps run nevertheless.
            log(DEBUG, "%s not cleared: %r", name, error)
    return cleared
