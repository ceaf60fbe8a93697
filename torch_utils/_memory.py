"""Devices and memory: queries that change nothing, emptying caches, and trimming the heap."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, dataclass, field
from operator import sub
from typing import Any, TypedDict

from torch_utils._runtime import (
    DEBUG,
    cuda_is_of_parent,
    early_bound,
    import_torch,
    is_shutting_down,
    loaded_torch,
    log,
    private,
)

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


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory at one moment. ``after - before`` is the difference in bytes.

    Attributes:
        host: The resident memory of the process.
        devices: By their names in torch ("cuda:0"): those in use, and the other visible ones of
            CUDA if NVML describes them, which needs no device context.
    """

    host: HostMemory = field(default_factory=HostMemory)
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)

    def __sub__(self, other: MemorySnapshot) -> MemorySnapshot:
        def difference(left: Any, right: Any) -> Any:
            return type(left)(*map(sub, astuple(left), astuple(right)))

        devices = {
            name: difference(*(each.devices.get(name, DeviceMemory()) for each in (self, other)))
            for name in sorted({*self.devices, *other.devices})
        }
        return MemorySnapshot(difference(self.host, other.host), devices)


def query(question: Callable[[], Any], default: Any, what: str) -> Any:
    """Ask torch about devices; return the default if it raises."""
    try:
        return question()
    except Exception as error:
        # Drivers, half-imported modules and stand-ins raise anything, and cleanup code, which must
        # not raise, calls this.
        log(DEBUG, "%s: the query failed: %r", what, error)
        return default


BACKENDS = ("cuda", "xpu", "mps")
"""Kinds of devices, the preferred first."""


_AUTOCAST = ("cpu", *BACKENDS)


def devices_in_use(backend: str, torch: Any) -> list[int]:
    """Return the indices of a backend's devices that this process uses. Never raises."""
    try:
        module = getattr(torch, backend)
        if backend == "mps":  # Metal's only device is in use if its allocator holds memory.
            is_available = torch.backends.mps.is_available()
            return [0] if is_available and module.driver_allocated_memory() else []
        if not module.is_initialized():
            return []
        has_context = private(torch, "_C._cuda_hasPrimaryContext") if backend == "cuda" else None
        # Devices that hold memory must have a context.
        has_context = has_context or module.memory_reserved
        return [index for index in range(module.device_count()) if has_context(index)]
    except Exception as error:  # As in `query`, which takes longer.
        log(DEBUG, "%s devices in use: the query failed: %r", backend, error)
        return []


# NVML describes cards without a context. torch itself counts them by it.


@functools.lru_cache(maxsize=1)
def _nvml() -> Any:
    """Return NVML's library, or None if it is not installed."""
    ctypes: Any = sys.modules["ctypes"]  # torch imports it.
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _cards(torch: Any) -> list[tuple[str, DeviceMemory]]:
    """Return the names and the memory of CUDA's visible cards, without a context."""
    if _nvml() is None:
        return []
    ctypes, nvml = sys.modules["ctypes"], _nvml()
    of_visible = private(torch, "cuda._get_nvml_device_index")  # It reads CUDA_VISIBLE_DEVICES.
    cards = []
    for index in range(torch.cuda.device_count()):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        sizes = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        number = ctypes.c_uint(index if of_visible is None else of_visible(index))
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
            or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
            or nvml.nvmlDeviceGetMemoryInfo(handle, sizes)
        ):
            raise OSError(f"NVML does not describe cuda:{index}")
        memory = DeviceMemory(0, 0, sizes[1], sizes[0])
        cards.append((name.value.decode(errors="replace"), memory))
    return cards


def _driver_is_too_old(torch: Any) -> bool:
    """Return whether the driver supports only an older CUDA than that of this build of torch."""
    build = getattr(torch.version, "cuda", None)  # None for ROCm
    if build is None or _nvml() is None:
        return False
    ctypes = sys.modules["ctypes"]
    newest = ctypes.c_int()  # 12080 for CUDA 12.8
    failed = _nvml().nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(newest))
    return not failed and newest.value // 1000 < int(build.partition(".")[0])


def _memory_of(backend: str, index: int, torch: Any) -> DeviceMemory:
    module = getattr(torch, backend)
    if backend == "mps":
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        total = module.recommended_max_memory()
        return DeviceMemory(allocated, reserved, max(total - reserved, 0), total)
    free, total = module.mem_get_info(index)
    return DeviceMemory(module.memory_allocated(index), module.memory_reserved(index), free, total)


def _device_memory() -> dict[str, DeviceMemory]:
    torch = loaded_torch()
    found: dict[str, DeviceMemory] = {}
    if torch is None:
        return {}
    if private(torch, "version.cuda"):
        cards = query(functools.partial(_cards, torch), [], "NVML")
        found.update((f"cuda:{index}", memory) for index, (_, memory) in enumerate(cards))
    for backend in BACKENDS:
        for index in devices_in_use(backend, torch):
            name = f"{backend}:{index}"
            found.pop(name, None)
            memory = query(functools.partial(_memory_of, backend, index, torch), None, name)
            if memory is not None:
                found[name] = memory
    return found


@early_bound
def memory_snapshot() -> MemorySnapshot:
    """Measure the memory of this process and of every device that it uses.

    Takes microseconds. Initialises no device, synchronises nothing, imports nothing and never
    raises.

    Returns:
        The memory in bytes. The host's numbers are 0 on systems other than Linux.
    """
    host = HostMemory()
    with suppress(OSError, ValueError):
        # statm has the counters of status in a tenth of the time. Its third field counts file
        # pages and shared memory; see proc(5).
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no import of pathlib)
            resident, shared = map(int, file.read().split()[1:3])
        rss_bytes, file_backed_bytes = resident * _PAGE_BYTES, shared * _PAGE_BYTES
        host = HostMemory(rss_bytes, rss_bytes - file_backed_bytes, file_backed_bytes)
    return MemorySnapshot(host, {} if is_shutting_down() else _device_memory())


def _captures_graph(backend: str, torch: Any) -> bool:
    """Return whether a graph is being captured on a device in use; to free memory breaks that."""
    module = getattr(torch, backend)
    ask: Any = getattr(module, "is_current_stream_capturing", None)
    for index in devices_in_use(backend, torch) if ask is not None else ():
        with module.device(index):  # Any other device would get a context.
            if ask():
                return True
    return False


def _empty_cache(backend: str, torch: Any) -> bool:
    """Empty the caches of all devices of a backend, which one call of torch's function does.

    It is called on a device that has a context; on any other it would create one.
    """
    in_use = devices_in_use(backend, torch)

    def empty() -> bool:
        if _captures_graph(backend, torch):
            return False
        module = getattr(torch, backend)
        with nullcontext() if backend == "mps" else module.device(in_use[0]):
            module.empty_cache()
        return True

    # A device in an error state (illegal access, lost GPU) raises from every call.
    return bool(in_use) and query(empty, False, f"emptying the cache of {backend}")


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
    torch = None if is_shutting_down() else loaded_torch()
    return torch is not None and _empty_cache("cuda", torch)


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
        # A property without a setter, a frozen owner or a validating __setattr__ may raise
        # anything. A deleter may still work.
        with suppress(Exception):
            setattr(obj, tensor_attr_name, None)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this for owners that may be half built or torn down.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False


def empty_caches() -> list[str]:
    """Empty the caches of all devices in use; return the names of the backends. Never raises."""
    torch = None if is_shutting_down() else loaded_torch()
    return [one for one in BACKENDS if torch is not None and _empty_cache(one, torch)]


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


_SHARED_HEAP = {-8: 1, -3: 32 << 20, -1: 64 << 20}
"""For `mallopt`: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h.

The thresholds are the largest that glibc would choose by itself. Without them, a shared heap
shrinks and grows again all the time.
"""


@functools.lru_cache(maxsize=1)
def share_heap() -> bool:
    """Let threads that allocate for the first time from now on share the heap of the main thread.

    glibc gives each of them a heap of its own, and `trim_host` cannot return the free end of those.
    Does nothing with other C libraries, or if the environment sets up malloc. Only the first call
    acts, so that later settings of the program remain. Never raises.

    Returns:
        True if they will.
    """
    is_set_up = any(name.startswith("MALLOC_") for name in os.environ)
    is_set_up |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set_up or not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(option, value) for option, value in _SHARED_HEAP.items())
    except (ImportError, OSError, AttributeError) as error:
        log(DEBUG, "each thread has a heap of its own: %r", error)
        return False


def is_resident(address: int, nbytes: int) -> bool:
    """Return whether most pages of an area of memory are in use by this process (Linux)."""
    ctypes: Any = sys.modules.get("ctypes")
    first = -(-address // _PAGE_BYTES)
    pages = (address + nbytes) // _PAGE_BYTES - first
    if ctypes is None or pages < 1 or not sys.platform.startswith("linux"):
        return False
    found = (ctypes.c_ubyte * pages)()
    where = ctypes.c_void_p(first * _PAGE_BYTES), ctypes.c_size_t(pages * _PAGE_BYTES)
    failed = ctypes.CDLL(None).mincore(*where, found)  # ENOMEM: nothing is mapped there.
    return not failed and bytes(found).count(1) > pages / 2


def clear_autocast_cache() -> bool:
    """Clear the copies of weights that autocast keeps in this thread, if it is on.

    In other threads it keeps no copies, and torch's lock of them may hang in a forked child.
    """
    torch: Any = loaded_torch()
    ask = getattr(torch, "is_autocast_enabled", None)
    if ask is None or not any(query(functools.partial(ask, one), False, one) for one in _AUTOCAST):
        return False
    torch.clear_autocast_cache()
    return True


def clear_caches_of_torch() -> None:
    """Clear what torch keeps outside its allocators, which `empty_cache` does not return.

    Imports no module and initialises no device that the program does not use. Never raises: this
    torch may lack a function, or a device may be in error.
    """
    torch = loaded_torch()
    if torch is None:
        return
    dynamo = sys.modules.get("torch._dynamo")  # Importing it takes 0.8 s.
    if dynamo is not None and not getattr(dynamo.__spec__, "_initializing", False):
        query(dynamo.reset, None, "compiled code")  # Its guards keep models alive.
    if _has_frozen():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    if query(
        lambda: not torch.cuda.is_initialized() or _captures_graph("cuda", torch), True, "CUDA"
    ):
        return  # These steps would initialise CUDA, or break the capture of a graph.
    query(lambda: _clear_cublas_workspaces(torch), None, "cuBLAS workspaces")
    for index in range(torch.cuda.device_count()):  # Their work areas are on the device.
        query(torch.backends.cuda.cufft_plan_cache[index].clear, None, "cuFFT plans")
    query(torch.cuda.ipc_collect, None, "tensors that other processes have closed")
    empty_pinned_cache(torch)


def _has_frozen() -> bool:
    """Return whether the program froze its heap by `gc.freeze`, which hides it from `gc`."""
    return gc.get_freeze_count() > 1000  # Python 3.12 itself freezes about 400 objects.


def _clear_cublas_workspaces(torch: Any) -> None:
    """Clear cuBLAS's workspaces: about 8.5 MB (32 MiB on Hopper) for each handle and stream.

    A CUDA graph keeps the address of its stream's workspace, but not the workspace itself. After
    clearing, a replay would write to memory of others. So the workspaces stay while a graph may
    exist.
    """
    kind = torch.cuda.CUDAGraph
    kinds = [kind, *kind.__subclasses__()]
    if _has_frozen() or any(type(one) in kinds for one in gc.get_referrers(*kinds)):
        log(DEBUG, "cuBLAS workspaces not cleared: a CUDA graph may use them")
    else:
        torch._C._cuda_clearCublasWorkspaces()


def empty_pinned_cache(torch: Any) -> None:
    """Free page-locked host memory that torch keeps for the next copy. Never raises.

    The public function exists from torch 2.13 on; `torch.cuda.graph` calls the older private one.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or private(torch, "_C._host_emptyCache")
    if empty is not None:
        query(empty, None, "pinned host memory")


# What there is


class DeviceInfo(TypedDict):
    """The result of `get_device_info`.

    ``memory`` has the ``allocated_bytes``, ``reserved_bytes``, ``free_bytes`` and ``total_bytes``
    of each device in `memory_snapshot`.
    """

    cuda_available: bool
    device_count: int
    current_device: int | None
    device_name: str
    backend: str
    torch_version: str | None
    memory: dict[str, dict[str, int]]


def _cuda_is_available(torch: Any) -> bool:
    """Return whether CUDA is available without cuInit, which disables CUDA in later forks.

    See vllm#32611. `torch.cuda.device_count` asks NVML, and the driver only if NVML is missing, as
    `torch.cuda.is_available` does with PYTORCH_NVML_BASED_CUDA_CHECK=1. If the program has set
    that variable, its choice wins. A forked child of a process that used CUDA cannot use it.
    NVML also answers if the driver is too old for this build (pytorch#98885).
    """
    if cuda_is_of_parent(torch):
        return False
    if "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ:
        return bool(torch.cuda.is_available())
    return int(torch.cuda.device_count()) > 0 and not _driver_is_too_old(torch)


def _is_available(backend: str, torch: Any) -> bool:
    def ask() -> bool:
        if backend == "cuda":
            return _cuda_is_available(torch)
        return bool((torch.xpu if backend == "xpu" else torch.backends.mps).is_available())

    return bool(query(ask, False, f"is {backend} available"))


@early_bound
def is_cuda_available() -> bool:
    """Return whether CUDA (or ROCm) can be used.

    Imports torch unless the program is ending. Creates no device context, so the process may still
    fork afterwards. Never raises.

    Returns:
        True if it can be used. False if torch is missing, half-imported or broken, in a forked
        child of a process that used CUDA, and during shutdown.
    """
    torch = None if is_shutting_down() else import_torch()
    return torch is not None and _is_available("cuda", torch)


@early_bound
def get_optimal_device(force_cpu: bool = False) -> str:
    """Return the name of the best available device. Never raises for a valid argument.

    Args:
        force_cpu: Return "cpu" without any query.

    Returns:
        "cuda", "xpu", "mps" or "cpu". "cpu" also without torch and during shutdown.

    Raises:
        TypeError: ``force_cpu`` is neither True nor False, such as the name of a device.
    """
    if force_cpu is not True and force_cpu is not False:
        raise TypeError(f"force_cpu must be True or False, got {force_cpu!r}")
    torch = None if force_cpu or is_shutting_down() else import_torch()
    if torch is None:
        return "cpu"
    return next((backend for backend in BACKENDS if _is_available(backend, torch)), "cpu")


@early_bound
def get_device_info() -> DeviceInfo:
    """Describe torch's devices without initialising one. Never raises.

    For a backend that the program has not used yet, ``current_device`` is None, because to query
    it would create a device context of about 500 MB. The name and the memory of a card of CUDA come
    from NVML then; without NVML the name is "cuda", and ``memory`` is empty.

    Returns:
        A dictionary, see `DeviceInfo`. Memory is in bytes, by the name of the device in torch.
    """
    torch: Any = None if is_shutting_down() else import_torch()
    version = getattr(torch, "__version__", None)
    backend = name = get_optimal_device()
    count, current = 0, None
    if backend != "cpu":
        module = getattr(torch, backend)
        count = query(lambda: int(module.device_count()), 1, "device_count")
        if in_use := devices_in_use(backend, torch):
            current = query(lambda: int(module.current_device()), in_use[0], "current_device")
            name = query(lambda: str(module.get_device_name(current)), backend, "device name")
        elif private(torch, "version.cuda"):
            name = query(lambda: _cards(torch)[0][0], backend, "NVML")
    return DeviceInfo(
        cuda_available=is_cuda_available(),
        device_count=count,
        current_device=current,
        device_name=name,
        backend=backend,
        torch_version=None if version is None else str(version),
        memory={each: asdict(one) for each, one in memory_snapshot().devices.items()},
    )
