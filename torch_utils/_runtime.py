"""What is still alive: the interpreter's phase, torch if the program loaded it, this log.

Everything here works in every phase of a shutdown. By then module globals may be None, so
functions that a destructor can reach take what they need as default arguments, which are
bound when the function is made and outlive the module.
"""

from __future__ import annotations

import sys

# What is imported with the package itself avoids `typing` and `collections.abc`: at the start of
# a program they are not loaded yet, and cost three times as much as all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

DEBUG = 10
ERROR = 40
_MODULE = type(sys)


class Phase:
    """How far this process has come towards its end."""

    __slots__ = ("exiting",)

    def __init__(self) -> None:
        self.exiting = False


PHASE = Phase()


def is_shutting_down(
    *, _phase: Phase = PHASE, _is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> bool:
    """Say whether this program is ending.

    True from the moment this package's exit registration runs, which is before any module
    is taken apart; `sys.is_finalizing` alone turns True only after the atexit callbacks.
    Correct in every phase, also when ``sys`` is gone. Never raises. Safe from any thread.

    Returns:
        True while the interpreter closes what is open and from then on.
    """
    return _phase.exiting or _is_finalizing()


def loaded_torch(
    *, _modules: dict[str, ModuleType] = sys.modules, _module: type[ModuleType] = _MODULE
) -> Any | None:
    """Return torch if the program has imported it completely, without importing it.

    None when torch is missing, blocked (``sys.modules["torch"] = None``), a lazy module whose
    import has not happened (`importlib.util.LazyLoader`), still being imported, or already
    swept away by a shutdown. Never raises.
    """
    torch = _modules.get("torch")
    if torch is None:
        return None
    kind = type(torch)
    if kind is not _module and issubclass(kind, _module):
        # Any attribute of a lazy module would import it; this is the module's own dictionary.
        contents = _module.__getattribute__(torch, "__dict__")
        if kind.__name__ == "_LazyModule" or "Tensor" not in contents:
            return None
    spec = getattr(torch, "__spec__", None)
    if getattr(spec, "_initializing", False):
        return None
    return torch


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
    except Exception as error:
        # A broken installation fails in many ways: ImportError, OSError for a missing shared
        # library, RuntimeError from a half-imported module. Each means "no torch here".
        log(DEBUG, "torch cannot be imported: %r", error)
        return None
    return loaded_torch() and imported


def log(
    level: int,
    message: str,
    *args: object,
    exc_info: BaseException | None = None,
    _modules: dict[str, ModuleType] = sys.modules,
    _down: Callable[[], bool] = is_shutting_down,
) -> None:
    """Log under ``torch_utils``; never raises, and at shutdown never imports.

    The logger has a NullHandler, so a program that has not configured logging sees nothing:
    a cleanup must not be what makes its stderr dirty.
    """
    try:
        if "logging" not in _modules:
            if level <= 10 or _down():
                return  # Nobody can have configured a handler that would show it.
            import logging  # noqa: F401  (loaded for the lines below)
        logger = _modules["logging"].getLogger("torch_utils")
        if not logger.handlers:
            logger.addHandler(_modules["logging"].NullHandler())
        logger.log(level, message, *args, exc_info=exc_info)
    except Exception:  # noqa: S110
        # Reached from destructors while modules are being taken apart: the logging module may
        # be half gone, and there is no better place left to say so.
        pass
