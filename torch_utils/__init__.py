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

    from torch_utils._census import LiveEntry as LiveEntry
    from torch_utils._census import LiveMemory as LiveMemory
    from torch_utils._census import live_memory as live_memory
    from torch_utils._cleanup import SafePyTorchCleanup as SafePyTorchCleanup
    from torch_utils._growth import no_growth as no_growth
    from torch_utils._memory import DeviceInfo as DeviceInfo
    from torch_utils._memory import DeviceMemory as DeviceMemory
    from torch_utils._memory import HostMemory as HostMemory
    from torch_utils._memory import MemorySnapshot as MemorySnapshot
    from torch_utils._memory import get_device_info as get_device_info
    from torch_utils._memory import get_optimal_device as get_optimal_device
    from torch_utils._memory import is_cuda_available as is_cuda_available
    from torch_utils._memory import memory_snapshot as memory_snapshot
    from torch_utils._memory import safe_cuda_empty_cache as safe_cuda_empty_cache
    from torch_utils._memory import safe_tensor_cleanup as safe_tensor_cleanup
    from torch_utils._oom import clear_exception_frames as clear_exception_frames

    # For type checkers. A test compares these names with `_MODULE_OF`.
    from torch_utils._oom import find_batch_size as find_batch_size
    from torch_utils._oom import is_out_of_memory as is_out_of_memory
    from torch_utils._release.run import release as release
    from torch_utils._report import CleanupReport as CleanupReport
    from torch_utils._report import StillHeld as StillHeld
    from torch_utils._resource import Resource as Resource
    from torch_utils._resource import closes_on_error as closes_on_error
    from torch_utils._signals import SignalExit as SignalExit
    from torch_utils._signals import exit_on_signals as exit_on_signals
    from torch_utils._timing import Measurement as Measurement
    from torch_utils._timing import measure as measure
    from torch_utils._timing import measuring as measuring
    from torch_utils.errors import CleanupError as CleanupError
    from torch_utils.errors import MemoryGrowthError as MemoryGrowthError
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
    from torch_utils.hosting.sleep import Offloaded as Offloaded
    from torch_utils.hosting.sleep import offload as offload

_NAMES_IN = {
    "_census": "LiveEntry LiveMemory live_memory",
    "_cleanup": "SafePyTorchCleanup",
    "errors": "CleanupError MemoryGrowthError ModelInUseError ModelProcessError NoRoomError "
    "ReleasedError ResourceClosedError SignalError TorchUtilsError UnknownModelError",
    "_growth": "no_growth",
    "hosting.host": "HostStatus ModelHost",
    "hosting.pool": "ModelPool",
    "hosting.sleep": "Offloaded offload",
    "_memory": "DeviceInfo DeviceMemory HostMemory MemorySnapshot get_device_info "
    "get_optimal_device is_cuda_available memory_snapshot safe_cuda_empty_cache "
    "safe_tensor_cleanup",
    "_oom": "clear_exception_frames find_batch_size is_out_of_memory",
    "_release.run": "release",
    "_report": "CleanupReport StillHeld",
    "_resource": "Resource closes_on_error",
    "_signals": "SignalExit exit_on_signals",
    "_timing": "Measurement measure measuring",
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
