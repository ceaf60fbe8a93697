"""What is still alive: the interpreter's phase, torch if the program loaded it, this log.

Everything here works in every phase of a shutdown, when the globals of modules may be None.
`early_bound` is how: whatever a destructor or an exit callback can reach is decorated with it.
"""

from __future__ import annotations

import builtins
import gc
import sys

# What is imported with the package itself avoids `typing` and `collections.abc`: at the start of
# a program they are not loaded yet, and cost three times as much as all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

DEBUG = 10
ERROR = 40
_MODULE = type(sys)
MODULES = sys.modules
"""The very dictionary: ``sys.modules`` itself may be gone."""

_BUILTINS = dict(vars(builtins))
is_finalizing = sys.is_finalizing


def early_bound(function: F) -> F:
    """Give a function its own globals: what it names, as that is now.

    The one way in which this package binds early. Teardown sets the globals of modules to None,
    but not these, which belong to no module. A name that is not defined yet is missing at
    every call and not only at the last one, so that any test finds it. Replacing a name in the
    module afterwards changes nothing here. Unlike default arguments, this leaves the signature
    as it is meant.
    """
    names = {
        name: function.__globals__[name]
        for name in _names(function.__code__)
        if name in function.__globals__
    }
    private = {"__builtins__": _BUILTINS, "__name__": function.__module__, **names}
    make: Any = type(function)
    bound: F = make(
        function.__code__, private, function.__name__, function.__defaults__, function.__closure__
    )
    bound.__dict__.update(function.__dict__)
    for attribute in ("__kwdefaults__", "__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(bound, attribute, getattr(function, attribute))
    bound.__dict__["__wrapped__"] = (
        function  # Where `typing.get_type_hints` finds what annotations name.
    )
    return bound


def _names(code: CodeType) -> set[str]:
    """Collect the names that a function uses, and those of the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            names |= _names(constant)
    return names


class Phase:
    """How far this process has come towards its end."""

    __slots__ = ("exiting",)

    def __init__(self) -> None:
        self.exiting = False


PHASE = Phase()


@early_bound
def is_shutting_down() -> bool:
    """Say whether this program is ending.

    True from the moment this package's exit registration runs, which is before any module
    is taken apart; `sys.is_finalizing` alone turns True only after the atexit callbacks.
    Correct in every phase, also when ``sys`` is gone. Never raises. Safe from any thread.

    Returns:
        True while the interpreter closes what is open and from then on.
    """
    return PHASE.exiting or is_finalizing()


_INTERPRETER_FREEZES = 1000  # Python 3.12 starts with some 400; a program's heap has thousands.


@early_bound
def has_frozen() -> bool:
    """Say whether the program has put its heap aside by `gc.freeze`, where no walk sees it."""
    return gc.get_freeze_count() > _INTERPRETER_FREEZES


@early_bound
def loaded_torch() -> Any | None:
    """Return torch if the program has imported it completely, without importing it.

    None when torch is missing, blocked (``sys.modules["torch"] = None``), a lazy module whose
    import has not happened (`importlib.util.LazyLoader`), still being imported, or already
    swept away by a shutdown. Never raises.
    """
    torch = MODULES.get("torch")
    if torch is None:
        return None
    kind = type(torch)
    if kind is not _MODULE and issubclass(kind, _MODULE):
        # Any attribute of a lazy module would import it; this is the module's own dictionary.
        contents = _MODULE.__getattribute__(torch, "__dict__")
        if kind.__name__ == "_LazyModule" or "Tensor" not in contents:
            return None
    spec = getattr(torch, "__spec__", None)
    if getattr(spec, "_initializing", False):
        return None
    return torch


@early_bound
def log(level: int, message: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log under ``torch_utils``; never raises, and at shutdown never imports.

    The logger has no handler of its own: a program that has not configured logging sees errors on
    stderr, as Python does it.
    """
    try:
        if "logging" not in MODULES:
            if level <= DEBUG or is_shutting_down():
                return  # Nobody can have configured a handler that would show it.
            import logging  # noqa: F401  (loaded for the lines below)
        logging_module: Any = MODULES["logging"]
        logger = logging_module.getLogger("torch_utils")
        # An error of a cleanup has to be told somewhere.
        logger.log(level, message, *args, exc_info=exc_info)
    except Exception:  # noqa: S110
        # Reached from destructors while modules are being taken apart: the logging module may
        # be half gone, and there is no better place left to say so.
        pass


@early_bound
def whole_torch() -> Any | None:
    """Return `loaded_torch`, if it has what a release needs: not a stand-in, nor half of it."""
    torch = loaded_torch()
    try:
        contents = _MODULE.__getattribute__(torch, "__dict__")
    except (AttributeError, TypeError):  # No module at all.
        return None
    return torch if "Tensor" in contents and "nn" in contents else None


def import_torch() -> Any | None:
    """Return torch, importing it if the interpreter is healthy and it can be imported.

    Only the questions that are about to use torch ask this way (`is_cuda_available` and its
    like); whatever cleans up asks `loaded_torch`.
    """
    torch = loaded_torch()
    if torch is not None or is_shutting_down():
        return torch
    try:
        import torch as imported

        _ = imported.__version__  # A `LazyLoader` would otherwise put it off.
    except Exception as error:
        # A broken installation fails in many ways: ImportError, OSError for a missing shared
        # library, RuntimeError from a half-imported module. Each means "no torch here".
        log(DEBUG, "torch cannot be imported: %r", error)
        return None
    return loaded_torch()


def current_task() -> Any | None:
    """Return the asyncio task that the caller is in, if it is in one."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio is not None else None
    except (RuntimeError, AttributeError):  # No event loop runs here, or asyncio half-imported.
        return None
