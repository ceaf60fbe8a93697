"""The interpreter's phase, torch if the program loaded it, logging, and events for metrics.

Everything here works during shutdown, when the globals of modules may be None: functions that a
destructor or an exit callback calls are decorated with `early_bound`.
"""

from __future__ import annotations

import builtins
import sys
from _operator import sub  # `operator` itself would be imported for this alone
from itertools import repeat

# Modules that the package imports itself avoid `typing` and `collections.abc`, which take three
# times as long to import as these modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

DEBUG = 10
ERROR = 40
_MODULE = type(sys)
MODULES = sys.modules
"""The dictionary itself: the name ``sys.modules`` may be None."""

_BUILTINS = dict(vars(builtins))
is_finalizing = sys.is_finalizing


def early_bound(function: F) -> F:
    """Bind the global names of a function now, in a dictionary of its own.

    Shutdown sets the globals of modules to None, but not this dictionary. A name that is not
    defined yet is missing at every call, so any test finds it. Replacing the name in the module
    later has no effect here. Unlike default arguments, this keeps the signature. For a class, bind
    the names of all its methods.
    """
    if isinstance(function, type):
        for name, method in list(vars(function).items()):
            if type(method) is type(early_bound):
                setattr(function, name, early_bound(method))
        return function
    names = {**function.__globals__, "__builtins__": _BUILTINS}
    make: Any = type(function)
    bound: F = make(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    bound.__dict__.update(function.__dict__)
    for attribute in ("__kwdefaults__", "__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(bound, attribute, getattr(function, attribute))
    # `typing.get_type_hints` resolves annotations in its globals.
    bound.__dict__["__wrapped__"] = function
    return bound


class Phase:
    """Whether this process is ending; the class itself has the state."""

    exiting = False


@early_bound
def is_shutting_down() -> bool:
    """Return whether this program is ending.

    Unlike `sys.is_finalizing`, this is True during the exit callbacks as well, from this package's
    own callback on. Correct in every phase of the shutdown. Never raises. Safe from any thread.

    Returns:
        True from the moment when this package's exit callback starts.
    """
    return Phase.exiting or is_finalizing()


@early_bound
def loaded_torch() -> Any | None:
    """Return torch if the program has imported it completely. Never imports it, never raises.

    Returns:
        The module. None if torch is missing, blocked (``sys.modules["torch"] = None``), lazy and
        not loaded yet (`importlib.util.LazyLoader`), still being imported, or removed at shutdown.
    """
    torch = MODULES.get("torch")
    if torch is None:
        return None
    kind = type(torch)
    if kind is not _MODULE and issubclass(kind, _MODULE):
        # Any attribute of a lazy module would import it; its dictionary does not.
        contents = _MODULE.__getattribute__(torch, "__dict__")
        if kind.__name__ == "_LazyModule" or "Tensor" not in contents:
            return None
    spec = getattr(torch, "__spec__", None)
    if getattr(spec, "_initializing", False):
        return None
    return torch


@early_bound
def log(level: int, message: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log to the logger ``torch_utils``. Never raises; never imports during shutdown.

    The logger has no handler of its own. Without a logging configuration, errors go to stderr.
    """
    try:
        if "logging" not in MODULES:
            if level <= DEBUG or is_shutting_down():
                return  # Without logging, no handler shows it.
            import logging  # noqa: F401  (used through MODULES below)
        logging_module: Any = MODULES["logging"]
        logger = logging_module.getLogger("torch_utils")
        logger.log(level, message, *args, exc_info=exc_info)
    except Exception:  # noqa: S110
        # Destructors call this during shutdown, when the logging module may be half gone.
        pass


LISTENERS: list[Callable[[str, dict[str, Any]], object]] = []
"""Functions that are called with each event's name and values, in the thread that caused it."""


@early_bound
def notify(event: str, **values: Any) -> None:
    """Call all listeners, for metrics. Never raises: a listener must not break a release."""
    for listener in LISTENERS:
        try:
            listener(event, values)
        except Exception as error:
            # Listeners may raise anything.
            log(DEBUG, "event %s was not counted: %r", event, error)


@early_bound
def whole_torch() -> Any | None:
    """Return `loaded_torch` if it is complete enough for a release, and not a stand-in."""
    torch = loaded_torch()
    try:
        contents = _MODULE.__getattribute__(torch, "__dict__")
    except (AttributeError, TypeError):  # Not a module.
        return None
    return torch if "Tensor" in contents and "nn" in contents else None


def import_torch() -> Any | None:
    """Return torch, importing it unless the program is ending; None if that fails.

    Only for functions that are about to use torch, such as `is_cuda_available`. Cleanup code calls
    `loaded_torch`.
    """
    torch = loaded_torch()
    if torch is not None or is_shutting_down():
        return torch
    try:
        import torch as imported

        _ = imported.__version__  # Completes the import of a `LazyLoader`.
    except Exception as error:
        # A broken installation may raise ImportError, OSError (a missing shared library),
        # RuntimeError (a half-imported module) and others. Each means that torch cannot be used.
        log(DEBUG, "torch cannot be imported: %r", error)
        return None
    return loaded_torch()


def current_task() -> Any | None:
    """Return the running asyncio task, or None."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio is not None else None
    except (RuntimeError, AttributeError):  # No running event loop, or asyncio is half-imported.
        return None


FALLBACKS = {
    "_C.DisableTorchFunction": "a tensor subclass may notice that its tensors are read",
    "_C._DisableTorchDispatch": "a tensor subclass may notice that its tensors are read",
    "_C._swap_tensor_impl": "passed tensors stay as they are, with an error each; no model sleeps",
    "_C._storage_Use_Count": "models cannot sleep and are unloaded instead",
    "Tensor._use_count": "models cannot sleep and are unloaded instead",
    "Tensor._fix_weakref": "before torch 2.10, growth of a graph is named as loose tensors",
    "_C._is_cached_tensor": "outputs of compiled code's CUDA graphs are errors",
    "_C._storage_address": "the search for holders takes longer",
    "_C._FunctionBase": "no autograd graph is named as a holder",
    "utils.data.dataloader._MultiProcessingDataLoaderIter": "no iterator of a loader is named",
    "_C.ScriptObject": "packed weights cause no garbage collection",
    "UntypedStorage._weak_ref": "storages are not counted",
    "UntypedStorage._expired": "storages are not counted",
    "UntypedStorage._cdata": "storages are not counted",
    "_C._cuda_hasPrimaryContext": "devices are in use if they hold memory",
    "cuda._get_nvml_device_index": "cards are described in the order of NVML",
    "_C._cuda_clearCublasWorkspaces": "cuBLAS workspaces are not cleared",
    "_C._host_emptyCache": "pinned host memory is not freed before torch 2.13",
}
"""The private names of torch that a release uses, and the effect if one is missing."""


def cuda_is_of_parent(torch: Any) -> bool:
    """Return whether this is a forked child of a process that used CUDA, which cannot use it."""
    is_in_bad_fork = getattr(torch.cuda, "_is_in_bad_fork", None)
    return is_in_bad_fork is not None and bool(is_in_bad_fork())


def private(torch: Any, name: str) -> Any | None:
    """Return an attribute of torch, such as the private ones in `FALLBACKS`, or None."""
    for attribute in name.split("."):
        torch = getattr(torch, attribute, None)
    return torch


def is_before_2_10(torch: Any) -> bool:
    """Return whether torch refers to a tensor's object only if nothing in Python does.

    From 2.10 on it also does so while C++ uses a tensor that Python refers to.
    """
    parts = str(getattr(torch, "__version__", "")).split(".")[:2]
    return all(map(str.isdigit, parts)) and [*map(int, parts)] < [2, 10]


def has_gil() -> bool:
    """Return whether only one thread runs Python code at a time."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def reference_counts(things: list[Any]) -> list[int]:
    """Return the number of references to each object, without those of this list."""
    return list(map(sub, map(sys.getrefcount, things), repeat(_OWN_REFERENCES)))


_OWN_REFERENCES = 0
_OWN_REFERENCES = reference_counts([object()])[0]  # Python versions differ.
