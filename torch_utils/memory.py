"""Measure memory, empty the caches of devices in use, and trim the heap of the host."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from torch_utils._runtime import (
    DEBUG,
    early_bound,
    has_frozen,
    is_shutting_down,
    loaded_torch,
    log,
    private,
)

__all__ = [
    "DeviceMemory",
    "HostMemory",
    "MemorySnapshot",
    "memory_snapshot",
    "safe_cuda_empty_cache",
    "safe_tensor_cleanup",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class HostMemory:
    """The resident memory of the process, in bytes.

    Attributes:
        rss_bytes: All resident memory.
        anonymous_bytes: The heap and anonymous mappings.
        file_backed_bytes: Mapped files and shared memory. Other processes may share these pages.
    """

    rss_bytes: int = 0
    anonymous_bytes: int = 0
    file_backed_bytes: int = 0

    def __sub__(self, other: HostMemory) -> HostMemory:
        return HostMemory(*_differences(self, other))


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
        allocated_bytes: Memory of this process's tensors.
        reserved_bytes: Memory that torch's allocator has taken from the driver.
        free_bytes: Free memory on the device, for all processes.
        total_bytes: Size of the device's memory.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0

    def __sub__(self, other: DeviceMemory) -> DeviceMemory:
        return DeviceMemory(*_differences(self, other))


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory at one moment. ``after - before`` is the difference in bytes.

    Attributes:
        host: The resident memory of the process.
        devices: The devices in use, by their names in torch ("cuda:0").
    """

    host: HostMemory = field(default_factory=HostMemory)
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)

    def __sub__(self, other: MemorySnapshot) -> MemorySnapshot:
        nothing = DeviceMemory()
        names = sorted({*self.devices, *other.devices})
        devices = {n: self.devices.get(n, nothing) - other.devices.get(n, nothing) for n in names}
        return MemorySnapshot(self.host - other.host, devices)


def _differences(left: Any, right: Any) -> list[int]:
    return [getattr(left, f.name) - getattr(right, f.name) for f in fields(left)]


def _host_memory() -> HostMemory:
    try:
        # statm has the counters of status in a tenth of the time. Its third field counts file
        # pages and shared memory; see proc(5).
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no import of pathlib)
            _, resident, shared = (int(word) * _PAGE_BYTES for word in file.read().split()[:3])
        return HostMemory(resident, resident - shared, shared)
    except (OSError, ValueError, NameError):  # NameError: late in shutdown `open` is gone.
        return HostMemory()


def query(question: Callable[[], Any], default: Any, what: str) -> Any:
    """Ask torch about devices; return the default if it raises."""
    try:
        return question()
    except Exception as error:
        # Drivers, half-imported modules and stand-ins raise anything, and cleanup code, which must
        # not raise, calls this.
        log(DEBUG, "%s: the query failed: %r", what, error)
        return default


def _contexts(module: Any, has_context: Callable[[int], bool] | None = None) -> list[int]:
    """List the devices of an initialised backend that have a context of this process."""
    if not module.is_initialized():
        return []
    if has_context is None:  # Devices that hold memory must have a context.
        has_context = module.memory_reserved
    return [index for index in range(module.device_count()) if has_context(index)]


def _cuda_contexts(torch: Any) -> list[int]:
    bindings = getattr(torch, "_C", None)
    return _contexts(torch.cuda, getattr(bindings, "_cuda_hasPrimaryContext", None))


def _mps_devices(torch: Any) -> list[int]:
    """Return [0] if Metal's only device is in use, that is, if its allocator holds memory."""
    mps = torch.mps
    return [0] if torch.backends.mps.is_available() and mps.driver_allocated_memory() else []


BACKENDS: dict[str, Callable[[Any], list[int]]] = {
    "cuda": _cuda_contexts,
    "xpu": lambda torch: _contexts(torch.xpu),
    "mps": _mps_devices,
}
"""Kinds of devices, the preferred first. Each function lists the indices of devices in use."""


def devices_in_use(backend: str, torch: Any) -> list[int]:
    """Return the indices of a backend's devices that this process uses. Never raises."""
    found: list[int] = query(lambda: BACKENDS[backend](torch), [], f"{backend} devices in use")
    return found


def _memory_of(backend: str, index: int, torch: Any) -> DeviceMemory:
    module = getattr(torch, backend)
    if backend == "mps":
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        total = module.recommended_max_memory()
        return DeviceMemory(allocated, reserved, max(total - reserved, 0), total)
    free, total = module.mem_get_info(index)
    return DeviceMemory(module.memory_allocated(index), module.memory_reserved(index), free, total)


def _device_memory() -> dict[str, DeviceMemory]:
    torch, found = loaded_torch(), {}
    for backend in BACKENDS if torch is not None else ():
        for index in devices_in_use(backend, torch):
            name = f"{backend}:{index}"
            read = functools.partial(_memory_of, backend, index, torch)
            found[name] = query(read, None, f"memory of {name}")
    return {name: memory for name, memory in found.items() if memory is not None}


@early_bound
def memory_snapshot() -> MemorySnapshot:
    """Measure the memory of this process and of every device that it uses.

    Takes microseconds. Initialises no device, synchronises nothing, imports nothing and never
    raises.

    Returns:
        The memory in bytes. The host's numbers are 0 on systems other than Linux.
    """
    try:
        if is_shutting_down():
            return MemorySnapshot(_host_memory())
        return MemorySnapshot(_host_memory(), _device_memory())
    except TypeError:  # Late in shutdown the classes are None.
        return MemorySnapshot()


def _is_capturing(module: Any) -> bool:
    """Return whether a CUDA graph is being captured, which emptying a cache would break.

    Call it inside the guard of a device in use: on other devices it creates a device context.
    """
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def captures_graph(torch: Any) -> bool:
    """Return whether this thread is capturing a CUDA graph on a device in use."""
    for index in devices_in_use("cuda", torch):
        with torch.cuda.device(index):
            if _is_capturing(torch.cuda):
                return True
    return False


def _empty_cache(backend: str, torch: Any, devices: Collection[str] | None = None) -> bool:
    emptied = False
    for index in devices_in_use(backend, torch):
        name = f"{backend}:{index}"
        if devices is None or {backend, name} & {*devices}:
            empty = functools.partial(_empty_one, getattr(torch, backend), index)
            # A device in an error state (illegal access, lost GPU) raises from every call.
            emptied |= query(empty, False, f"emptying the cache of {name}")
    return emptied


def _empty_one(module: Any, index: int) -> bool:
    with module.device(index) if hasattr(module, "device") else nullcontext():
        if _is_capturing(module):
            return False
        module.empty_cache()
        return True


@early_bound
def safe_cuda_empty_cache() -> bool:
    """Return the unused memory of torch's CUDA allocator to the driver.

    Visits only devices that this process uses: on any other device `torch.cuda.empty_cache` would
    create a device context of about 500 MB. Does nothing without torch, before CUDA is
    initialised, in a forked child of a process that uses CUDA, while this thread captures a CUDA
    graph, and during shutdown. Takes about a microsecond if there is nothing to do. Never raises.
    Safe from any thread.

    Memory that is still referenced cannot be returned; release it first.

    Returns:
        True if a cache was emptied.
    """
    try:
        torch = loaded_torch()
        if torch is None or is_shutting_down() or not torch.cuda.is_initialized():
            return False
    except Exception as error:
        # torch may be half-imported, torch.cuda None, or is_initialized may raise.
        log(DEBUG, "CUDA cache not emptied: %r", error)
        return False
    return _empty_cache("cuda", torch)


@early_bound
def safe_tensor_cleanup(tensor_attr_name: str, obj: Any) -> bool:
    """Set the attribute ``obj.<tensor_attr_name>`` to None, to drop the tensors that it holds.

    Works for plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers. The attribute may hold a tensor or a list, tuple or dictionary of
    tensors. It is meant for destructors: it never raises, imports nothing and initialises no
    device. It is as thread-safe as setting an attribute.

    Other references keep the tensor's memory alive. To free it nevertheless, use `release`.

    Args:
        tensor_attr_name: The name of the attribute.
        obj: Its owner. It may be None or half built.

    Returns:
        True if the attribute held something and was cleared. False if it was missing or None, or
        if the owner refused the change and is unchanged.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner or a validating __setattr__ may raise
            # anything. A deleter may still work.
            log(DEBUG, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this for owners that may be half built or torn down.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False


def empty_caches(devices: Collection[str] | None = None) -> list[str]:
    """Empty the caches of devices; return the names of the backends. Never raises.

    Args:
        devices: Their names ("cuda:0"); None for all devices in use.
    """
    torch = None if is_shutting_down() else loaded_torch()
    if torch is None:
        return []
    return [backend for backend in BACKENDS if _empty_cache(backend, torch, devices)]


def trim_host() -> bool:
    """Return unused pages of the C heap to the system, by ``malloc_trim`` of glibc.

    Does nothing with other C libraries. Releases the GIL meanwhile. Never raises.

    Returns:
        True if pages were returned.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or is_shutting_down() or not sys.platform.startswith("linux"):
        return False  # torch imports ctypes; without torch there is little to trim.
    try:
        # CDLL releases the GIL, unlike PyDLL. None means this process, which is 40 times faster
        # than to find the C library by its name.
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError) as error:
        log(DEBUG, "host heap not trimmed: %r", error)
        return False


# What torch keeps outside its allocators, which `empty_cache` does not return. No step imports a
# module or initialises a device that the program does not use.


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
    kinds = [] if kind is None else [kind, *kind.__subclasses__()]
    return has_frozen() or any(type(one) in kinds for one in gc.get_referrers(*kinds))


def _clear_fft_plans(torch: Any) -> bool:
    """Clear cuFFT's plans, which hold work areas on the device."""
    for index in range(torch.cuda.device_count()):
        torch.backends.cuda.cufft_plan_cache[index].clear()
    return True


def _empty_pinned_cache(torch: Any) -> bool:
    """Free page-locked host memory that torch keeps for the next copy.

    The public function exists from torch 2.13 on; `torch.cuda.graph` calls the older private one.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or private(torch, "_C._host_emptyCache")
    return empty is not None and empty() is None


STEPS: dict[str, Callable[[Any], bool]] = {
    "compiled code": _reset_dynamo,
    "frozen cycles": _unfreeze,
}
CUDA_STEPS: dict[str, Callable[[Any], bool]] = {
    "cuBLAS workspaces": _clear_cublas_workspaces,
    "cuFFT plans": _clear_fft_plans,
    # Tensors that other processes have closed.
    "IPC handles": lambda torch: torch.cuda.ipc_collect() is None,
    "pinned host memory": _empty_pinned_cache,
}
"""Steps that would initialise CUDA, and would break the capture of a CUDA graph."""


def clear_caches_of_torch() -> list[str]:
    """Run all steps. Never raises: this torch may lack a function, or a device may be in error.

    Returns:
        The names of the steps that cleared something.
    """
    torch = loaded_torch()
    if torch is None:
        return []
    steps = dict(STEPS)
    if query(lambda: torch.cuda.is_initialized() and not captures_graph(torch), False, "CUDA"):
        steps.update(CUDA_STEPS)
    run = {name: functools.partial(step, torch) for name, step in steps.items()}
    return [name for name in run if query(run[name], False, name)]
