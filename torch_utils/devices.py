"""Queries about devices that change nothing.

No function here raises, creates a device context, or imports torch during shutdown.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from torch_utils._runtime import (
    DEBUG,
    early_bound,
    import_torch,
    is_shutting_down,
    loaded_torch,
    log,
)

__all__ = ["DeviceInfo", "get_device_info", "get_optimal_device", "is_cuda_available"]


_MEMORY = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes")


class DeviceInfo(TypedDict):
    """The result of `get_device_info`.

    ``memory`` has the devices that are in use, each with its ``allocated_bytes``,
    ``reserved_bytes``, ``free_bytes`` and ``total_bytes``.
    """

    cuda_available: bool
    device_count: int
    current_device: int | None
    device_name: str
    backend: str
    torch_version: str | None
    memory: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Backend:
    """A kind of device.

    Args:
        name: torch's name for the kind of device.
        is_available: Takes torch; returns whether a device of this kind can be used.
        initialized: Takes torch; returns the indices of the devices that are in use.
    """

    name: str
    is_available: Callable[[Any], bool]
    initialized: Callable[[Any], list[int]]

    def module(self, torch: Any) -> Any:
        """Return ``torch.<name>``, or None if this torch lacks it. Never raises."""
        return query(lambda t: getattr(t, self.name, None), torch, None, f"torch.{self.name}")


def _cuda_is_available(torch: Any) -> bool:
    """Return whether CUDA is available without cuInit, which disables CUDA in later forks.

    See vllm#32611. `torch.cuda.device_count` asks NVML, and the driver only if NVML is missing, as
    `torch.cuda.is_available` does with PYTORCH_NVML_BASED_CUDA_CHECK=1. If the program has set
    that variable, its choice wins. A forked child of a process that used CUDA cannot use it.
    """
    is_in_bad_fork = getattr(torch.cuda, "_is_in_bad_fork", None)
    if is_in_bad_fork is not None and is_in_bad_fork():
        return False
    if "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ:
        return bool(torch.cuda.is_available())
    return int(torch.cuda.device_count()) > 0


def _contexts(module: Any, has_context: Callable[[int], bool] | None) -> list[int]:
    """List the devices of an initialised backend that have a context of this process."""
    if not module.is_initialized():
        return []
    indices = range(module.device_count())
    if has_context is not None:
        return [index for index in indices if has_context(index)]
    # Without such a query: devices that hold memory must have a context.
    return [index for index in indices if module.memory_reserved(index) > 0]


def _cuda_contexts(torch: Any) -> list[int]:
    bindings = getattr(torch, "_C", None)
    return _contexts(torch.cuda, getattr(bindings, "_cuda_hasPrimaryContext", None))


def _mps_devices(torch: Any) -> list[int]:
    """Return [0] if Metal's only device is in use, that is, if its allocator holds memory."""
    mps = torch.mps
    return [0] if torch.backends.mps.is_available() and mps.driver_allocated_memory() else []


BACKENDS = (
    Backend("cuda", _cuda_is_available, _cuda_contexts),
    Backend("xpu", lambda t: bool(t.xpu.is_available()), lambda t: _contexts(t.xpu, None)),
    Backend("mps", lambda t: bool(t.backends.mps.is_available()), _mps_devices),
)


def query(question: Callable[[Any], Any], torch: Any, default: Any, what: str) -> Any:
    """Call a query with torch; return the default if it raises."""
    try:
        return question(torch)
    except Exception as error:
        # Drivers, half-imported modules and stand-ins raise anything, and cleanup code, which must
        # not raise, calls this.
        log(DEBUG, "%s: the query failed: %r", what, error)
        return default


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
    if torch is None:
        return False
    return bool(query(_cuda_is_available, torch, False, "is_cuda_available"))


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
        raise TypeError(
            f"force_cpu must be True or False, got {force_cpu!r}; the function chooses the device"
        )
    torch = None if force_cpu or is_shutting_down() else import_torch()
    if torch is None:
        return "cpu"
    for backend in BACKENDS:
        if query(backend.is_available, torch, False, f"is {backend.name} available"):
            return backend.name
    return "cpu"


def _describe(backend: Backend, torch: Any, info: DeviceInfo) -> None:
    module = backend.module(torch)
    info["device_count"] = int(query(lambda _: module.device_count(), torch, 1, "device_count"))
    info["device_name"] = backend.name
    in_use = initialized_devices(backend, torch)
    if not in_use:
        return
    current = int(query(lambda _: module.current_device(), torch, in_use[0], "current_device"))
    info["current_device"] = current
    info["device_name"] = str(
        query(lambda _: module.get_device_name(current), torch, backend.name, "get_device_name")
    )


def initialized_devices(backend: Backend, torch: Any) -> list[int]:
    """Return the indices of a backend's devices that this process uses. Never raises."""
    if backend.module(torch) is None:
        return []
    found: list[int] = query(backend.initialized, torch, [], f"{backend.name} devices in use")
    return found


def initialized_memory() -> dict[str, dict[str, int]]:
    """Return the memory of each device in use, in bytes, by its name in torch. Never raises."""
    torch = loaded_torch()
    found: dict[str, dict[str, int]] = {}
    if torch is None:
        return found
    for backend in BACKENDS:
        for index in initialized_devices(backend, torch):
            read = functools.partial(_read_memory, backend, index)
            memory = query(read, torch, None, f"memory of {backend.name}:{index}")
            if memory is not None:
                found[f"{backend.name}:{index}"] = memory
    return found


def _read_memory(backend: Backend, index: int, torch: Any) -> dict[str, int]:
    module = backend.module(torch)
    if backend.name == "mps":
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        total = module.recommended_max_memory()
        free = max(total - reserved, 0)
    else:
        free, total = module.mem_get_info(index)
        allocated, reserved = module.memory_allocated(index), module.memory_reserved(index)
    values = (allocated, reserved, free, total)
    return dict(zip(_MEMORY, values, strict=True))


@early_bound
def get_device_info() -> DeviceInfo:
    """Describe torch's devices without initialising one. Never raises.

    For a backend that the program has not used yet, ``current_device`` is None and ``memory`` is
    empty: to query them would create a device context of about 500 MB.

    Returns:
        A dictionary, see `DeviceInfo`. Memory is in bytes, by the name of the device in torch.
    """
    info = DeviceInfo(
        cuda_available=False,
        device_count=0,
        current_device=None,
        device_name="cpu",
        backend="cpu",
        torch_version=None,
        memory={},
    )
    torch = None if is_shutting_down() else import_torch()
    if torch is None:
        return info
    info["torch_version"] = query(lambda t: str(t.__version__), torch, None, "torch's version")
    info["cuda_available"] = is_cuda_available()
    info["backend"] = get_optimal_device()
    info["memory"] = initialized_memory()
    for backend in BACKENDS:
        if backend.name == info["backend"]:
            _describe(backend, torch, info)
    return info
