"""clean_exit: run any program and report whether it exited cleanly.

Errors in destructors, finalizers and atexit callbacks never change a program's exit code. A check
observes a Python program from inside, with a small probe. It observes every program from outside,
by its stderr and the processes that it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clean_exit.checker import check
    from clean_exit.findings import FINDINGS, Finding
    from clean_exit.report import ExitReport
    from clean_exit.supervisor_client import CheckerError

__all__ = ["FINDINGS", "CheckerError", "ExitReport", "Finding", "check"]

_MODULE_OF = {
    "check": "checker",
    "FINDINGS": "findings",
    "Finding": "findings",
    "ExitReport": "report",
    "CheckerError": "supervisor_client",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, because the pytest plugin is loaded in every test session.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
