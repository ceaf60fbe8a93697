"""Which devices there are, asked so that asking changes nothing.

None of these raises, creates a device context, or imports torch while the program ends.
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


class DeviceMemoryInfo(TypedDict):
    """Memory of one device, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


class DeviceInfo(TypedDict):
    """What `get_device_info` returns; memory only of devices that are already in use."""

    cuda_available: bool
    device_count: int
    current_device: int | None
    device_name: str
    backend: str
    torch_version: str | None
    memory: dict[str, DeviceMemoryInfo]


@dataclass(frozen=True)
class Backend:
    """What differs between the kinds of device, and nothing else.

    Args:
        name: torch's name for the kind of device.
        is_available: Whether a device of this kind can be used, given torch.
        initialized: The indices of its devices that are in use already, given torch.
    """

    name: str
    is_available: Callable[[Any], bool]
    initialized: Callable[[Any], list[int]]

    def module(self, torch: Any) -> Any:
        """Return ``torch.<name>``, or None where this torch has none. Never raises."""
        return ask(lambda t: getattr(t, self.name, None), torch, None, f"torch.{self.name}")


def _cuda_is_available(torch: Any) -> bool:
    """Ask without cuInit, which would leave every later fork without CUDA (vllm#32611).

    `torch.cuda.device_count` asks NVML, and the driver only where there is no NVML. It is what
    `torch.cuda.is_available` does with PYTORCH_NVML_BASED_CUDA_CHECK=1, without a change to the
    environment that other threads would see. A program that has set the variable has decided.
    A forked child of a process that used CUDA cannot use it.
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
    # Without that question: the ones that hold memory, whose context must exist.
    return [index for index in indices if module.memory_reserved(index) > 0]


def _cuda_contexts(torch: Any) -> list[int]:
    bindings = getattr(torch, "_C", None)
    return _contexts(torch.cuda, getattr(bindings, "_cuda_hasPrimaryContext", None))


def _mps_devices(torch: Any) -> list[int]:
    """Metal has one device; it is in use once its allocator holds something."""
    mps = torch.mps
    return [0] if torch.backends.mps.is_available() and mps.driver_allocated_memory() else []


BACKENDS = (
    Backend("cuda", _cuda_is_available, _cuda_contexts),
    Backend("xpu", lambda t: bool(t.xpu.is_available()), lambda t: _contexts(t.xpu, None)),
    Backend("mps", lambda t: bool(t.backends.mps.is_available()), _mps_devices),
)


def ask(question: Callable[[Any], Any], torch: Any, default: Any, what: str) -> Any:
    """Put a question to torch; an installation that cannot answer gets the default."""
    try:
        return question(torch)
    except Exception as error:
        # Drivers, half-imported modules and stand-ins fail in ways that cannot be listed, and
        # these questions are asked from cleanup, where an exception is the bug to avoid.
        log(DEBUG, "%s: torch cannot say: %r", what, error)
        return default


@early_bound
def is_cuda_available() -> bool:
    """Say whether CUDA (or ROCm) can be used, in every phase of the program.

    Imports torch if the interpreter is healthy. Creates no context, and a process may still
    fork afterwards. Never raises.

    Returns:
        False also when torch is missing, half-imported or broken, in a forked child of a process
        that used CUDA, and while the program ends.
    """
    torch = None if is_shutting_down() else import_torch()
    if torch is None:
        return False
    return bool(ask(_cuda_is_available, torch, False, "is_cuda_available"))


@early_bound
def get_optimal_device(force_cpu: bool = False) -> str:
    """Name the best device there is, in torch's words.

    Args:
        force_cpu: Answer "cpu" without asking.

    Returns:
        "cuda", "xpu", "mps" or "cpu"; "cpu" also without torch and while the program ends.
        Never raises.
    """
    torch = None if force_cpu or is_shutting_down() else import_torch()
    if torch is None:
        return "cpu"
    for backend in BACKENDS:
        if ask(backend.is_available, torch, False, f"is {backend.name} available"):
            return backend.name
    return "cpu"


def _describe(backend: Backend, torch: Any, info: DeviceInfo) -> None:
    module = backend.module(torch)
    info["device_count"] = int(ask(lambda _: module.device_count(), torch, 1, "device_count"))
    info["device_name"] = backend.name
    in_use = initialized_devices(backend, torch)
    if not in_use:
        return
    current = int(ask(lambda _: module.current_device(), torch, in_use[0], "current_device"))
    info["current_device"] = current
    info["device_name"] = str(
        ask(lambda _: module.get_device_name(current), torch, backend.name, "get_device_name")
    )


def initialized_devices(backend: Backend, torch: Any) -> list[int]:
    """List the devices of one backend that this process already uses. Never raises."""
    if backend.module(torch) is None:
        return []
    found: list[int] = ask(backend.initialized, torch, [], f"{backend.name} devices in use")
    return found


def initialized_memory() -> dict[str, DeviceMemoryInfo]:
    """Read the memory of every device in use, in bytes, by torch's name for it. Never raises."""
    torch = loaded_torch()
    found: dict[str, DeviceMemoryInfo] = {}
    if torch is None:
        return found
    for backend in BACKENDS:
        for index in initialized_devices(backend, torch):
            read = functools.partial(_read_memory, backend, index)
            memory = ask(read, torch, None, f"memory of {backend.name}:{index}")
            if memory is not None:
                found[f"{backend.name}:{index}"] = memory
    return found


def _read_memory(backend: Backend, index: int, torch: Any) -> DeviceMemoryInfo:
    module = backend.module(torch)
    if backend.name == "mps":
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        total = module.recommended_max_memory()
        free = max(total - reserved, 0)
    else:
        free, total = module.mem_get_info(index)
        allocated, reserved = module.memory_allocated(index), module.memory_reserved(index)
    return DeviceMemoryInfo(
        allocated_bytes=allocated, reserved_bytes=reserved, free_bytes=free, total_bytes=total
    )


@early_bound
def get_device_info() -> DeviceInfo:
    """Describe torch's devices, as far as that can be said without initialising one.

    Never raises. ``current_device`` is None, and ``memory`` empty, for a backend that the
    program has not used yet; asking for them would create a context of some 500 MB.

    Returns:
        A dictionary, see `DeviceInfo`; memory in bytes, by torch's name of the device.
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
    info["torch_version"] = ask(lambda t: str(t.__version__), torch, None, "torch's version")
    info["cuda_available"] = is_cuda_available()
    info["backend"] = get_optimal_device()
    info["memory"] = initialized_memory()
    for backend in BACKENDS:
        if backend.name == info["backend"]:
            _describe(backend, torch, info)
    return info
