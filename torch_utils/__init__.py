"""Make PyTorch resources go away safely, completely and cheaply.

Importing this package imports neither torch nor numpy; its one side effect is to register
with atexit what closes open resources at the end of the program. Each name below loads its
module when it is first used.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch_utils import exit as _exit  # noqa: F401  (the exit registration)
from torch_utils._runtime import is_shutting_down as is_shutting_down
from torch_utils._version import __version__ as __version__

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from typing import Any

    # For type checkers: the same names as in `_MODULE_OF`, which a test compares.
    from torch_utils.batch_size import find_batch_size as find_batch_size
    from torch_utils.cleanup import SafePyTorchCleanup as SafePyTorchCleanup
    from torch_utils.devices import DeviceInfo as DeviceInfo
    from torch_utils.devices import get_device_info as get_device_info
    from torch_utils.devices import get_optimal_device as get_optimal_device
    from torch_utils.devices import is_cuda_available as is_cuda_available
    from torch_utils.errors import CleanupError as CleanupError
    from torch_utils.errors import ModelInUseError as ModelInUseError
    from torch_utils.errors import ModelProcessError as ModelProcessError
    from torch_utils.errors import NoRoomError as NoRoomError
    from torch_utils.errors import ReleasedError as ReleasedError
    from torch_utils.errors import ResourceClosedError as ResourceClosedError
    from torch_utils.errors import SignalError as SignalError
    from torch_utils.errors import TorchUtilsError as TorchUtilsError
    from torch_utils.hosting.host import HostStatus as HostStatus
    from torch_utils.hosting.host import ModelHost as ModelHost
    from torch_utils.hosting.pool import ModelPool as ModelPool
    from torch_utils.measure import Measurement as Measurement
    from torch_utils.measure import measure as measure
    from torch_utils.measure import measuring as measuring
    from torch_utils.memory import DeviceMemory as DeviceMemory
    from torch_utils.memory import HostMemory as HostMemory
    from torch_utils.memory import MemorySnapshot as MemorySnapshot
    from torch_utils.memory import memory_snapshot as memory_snapshot
    from torch_utils.memory import safe_cuda_empty_cache as safe_cuda_empty_cache
    from torch_utils.oom import clear_exception_frames as clear_exception_frames
    from torch_utils.oom import is_out_of_memory as is_out_of_memory
    from torch_utils.release import release as release
    from torch_utils.release import safe_tensor_cleanup as safe_tensor_cleanup
    from torch_utils.report import CleanupReport as CleanupReport
    from torch_utils.report import StillHeld as StillHeld
    from torch_utils.resource import Resource as Resource
    from torch_utils.signals import SignalExit as SignalExit
    from torch_utils.signals import exit_on_signals as exit_on_signals

_MODULE_OF = {
    "CleanupError": "errors",
    "CleanupReport": "report",
    "DeviceInfo": "devices",
    "DeviceMemory": "memory",
    "HostMemory": "memory",
    "HostStatus": "hosting.host",
    "Measurement": "measure",
    "MemorySnapshot": "memory",
    "ModelHost": "hosting.host",
    "ModelInUseError": "errors",
    "ModelPool": "hosting.pool",
    "ModelProcessError": "errors",
    "NoRoomError": "errors",
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

__all__ = sorted([*_MODULE_OF, "is_shutting_down"])


class _Package(ModuleType):
    """Keeps a function's name when the module of the same name (``release``) is imported.

    The import system sets each submodule as an attribute of its package, which would hide the
    function behind the module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # To a type checker it would make every misspelt name an `Any`.

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
