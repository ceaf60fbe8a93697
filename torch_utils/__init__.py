"""Release PyTorch resources safely, completely and cheaply.

Importing this package imports neither torch nor numpy. Its only side effect is an atexit callback
that closes open resources. Each public name loads its module on first use.
"""

from __future__ import annotations

from torch_utils import _registry  # noqa: F401  (the exit registration)
from torch_utils._runtime import is_shutting_down as is_shutting_down
from torch_utils._version import __version__ as __version__

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from typing import Any

    # For type checkers. A test compares these names with `_MODULE_OF`.
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
    from torch_utils.errors import UnknownModelError as UnknownModelError
    from torch_utils.hosting.host import HostStatus as HostStatus
    from torch_utils.hosting.host import ModelHost as ModelHost
    from torch_utils.hosting.pool import ModelPool as ModelPool
    from torch_utils.memory import DeviceMemory as DeviceMemory
    from torch_utils.memory import HostMemory as HostMemory
    from torch_utils.memory import MemorySnapshot as MemorySnapshot
    from torch_utils.memory import memory_snapshot as memory_snapshot
    from torch_utils.memory import safe_cuda_empty_cache as safe_cuda_empty_cache
    from torch_utils.memory import safe_tensor_cleanup as safe_tensor_cleanup
    from torch_utils.oom import clear_exception_frames as clear_exception_frames
    from torch_utils.oom import is_out_of_memory as is_out_of_memory
    from torch_utils.releasing.run import release as release
    from torch_utils.report import CleanupReport as CleanupReport
    from torch_utils.report import StillHeld as StillHeld
    from torch_utils.resource import Resource as Resource
    from torch_utils.resource import closes_on_error as closes_on_error
    from torch_utils.signals import SignalExit as SignalExit
    from torch_utils.signals import exit_on_signals as exit_on_signals
    from torch_utils.timing import Measurement as Measurement
    from torch_utils.timing import measure as measure
    from torch_utils.timing import measuring as measuring

_NAMES_IN = {
    "batch_size": "find_batch_size",
    "cleanup": "SafePyTorchCleanup",
    "devices": "DeviceInfo get_device_info get_optimal_device is_cuda_available",
    "errors": "CleanupError ModelInUseError ModelProcessError NoRoomError ReleasedError "
    "ResourceClosedError SignalError TorchUtilsError UnknownModelError",
    "hosting.host": "HostStatus ModelHost",
    "hosting.pool": "ModelPool",
    "memory": "DeviceMemory HostMemory MemorySnapshot memory_snapshot safe_cuda_empty_cache "
    "safe_tensor_cleanup",
    "oom": "clear_exception_frames is_out_of_memory",
    "releasing.run": "release",
    "report": "CleanupReport StillHeld",
    "resource": "Resource closes_on_error",
    "signals": "SignalExit exit_on_signals",
    "timing": "Measurement measure measuring",
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "is_shutting_down"])


if not TYPE_CHECKING:  # Type checkers would accept every misspelt name.

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
