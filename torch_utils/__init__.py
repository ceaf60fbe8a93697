"""Make PyTorch resources go away safely, completely and cheaply.

Importing this package imports neither torch nor numpy; its one side effect is to register
with atexit what closes open resources at the end of the program. Each name below loads its
module when it is first used.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch_utils import exit as _exit  # noqa: F401  (the exit registration)
from torch_utils._runtime import is_shutting_down

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from typing import Any

    from torch_utils.batch_size import find_batch_size
    from torch_utils.cleanup import SafePyTorchCleanup
    from torch_utils.devices import (
        DeviceInfo,
        get_device_info,
        get_optimal_device,
        is_cuda_available,
    )
    from torch_utils.errors import (
        CleanupError,
        ReleasedError,
        ResourceClosedError,
        SignalError,
        TorchUtilsError,
    )
    from torch_utils.exit import fast_exit
    from torch_utils.measure import Measurement, measure, measuring
    from torch_utils.memory import (
        DeviceMemory,
        HostMemory,
        MemorySnapshot,
        memory_snapshot,
        safe_cuda_empty_cache,
    )
    from torch_utils.oom import clear_exception_frames, is_out_of_memory
    from torch_utils.release import release, safe_tensor_cleanup
    from torch_utils.report import CleanupReport, StillHeld
    from torch_utils.resource import Resource
    from torch_utils.signals import SignalExit, exit_on_signals

__version__ = "0.1.0"

_MODULE_OF = {
    "CleanupError": "errors",
    "CleanupReport": "report",
    "DeviceInfo": "devices",
    "DeviceMemory": "memory",
    "HostMemory": "memory",
    "Measurement": "measure",
    "MemorySnapshot": "memory",
    "ReleasedError": "errors",
    "Resource": "resource",
    "ResourceClosedError": "errors",
    "SafePyTorchCleanup": "cleanup",
    "SignalError": "errors",
    "SignalExit": "signals",
    "StillHeld": "report",
    "TorchUtilsError": "errors",
    "clear_exception_frames": "oom",
    "exit_on_signals": "signals",
    "fast_exit": "exit",
    "find_batch_size": "batch_size",
    "get_device_info": "devices",
    "get_optimal_device": "devices",
    "is_cuda_available": "devices",
    "is_out_of_memory": "oom",
    "measure": "measure",
    "measuring": "measure",
    "memory_snapshot": "memory",
    "release": "release",
    "safe_cuda_empty_cache": "memory",
    "safe_tensor_cleanup": "release",
}

__all__ = [
    "CleanupError",
    "CleanupReport",
    "DeviceInfo",
    "DeviceMemory",
    "HostMemory",
    "Measurement",
    "MemorySnapshot",
    "ReleasedError",
    "Resource",
    "ResourceClosedError",
    "SafePyTorchCleanup",
    "SignalError",
    "SignalExit",
    "StillHeld",
    "TorchUtilsError",
    "clear_exception_frames",
    "exit_on_signals",
    "fast_exit",
    "find_batch_size",
    "get_device_info",
    "get_optimal_device",
    "is_cuda_available",
    "is_out_of_memory",
    "is_shutting_down",
    "measure",
    "measuring",
    "memory_snapshot",
    "release",
    "safe_cuda_empty_cache",
    "safe_tensor_cleanup",
]


class _Package(ModuleType):
    """Keeps a function's name when the module of the same name (``release``) is imported.

    The import system sets each submodule as an attribute of its package, which would hide the
    function behind the module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
