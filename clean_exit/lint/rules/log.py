"""log: logging and printing, whose files and locks may be gone or held."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import last_name
from clean_exit.lint.values import Value, dotted, is_own

_LEVELS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
_LOGGER_NAME = re.compile(
    r"_*(logger|log|logging|loguru)_*|\w*_(logger|log)|getlogger|get_logger", re.I
)
_LOGGER = re.compile(r"(logging|loguru|structlog)(\.|$).*")
_PRINTING = {"builtins.print", "traceback.print_exc", "traceback.print_stack", "pprint.pprint",
             "rich.print", "click.echo", "traceback.print_exception", "typer.echo"}  # fmt: skip
_STREAM = re.compile(r"sys\.(__)?(stdout|stderr)(__)?(\.buffer)?\.(write|writelines|flush)")


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls of loggers, by what they are or by their usual names, and prints."""
    if frame.facts.alive:
        return ""
    said, func = dotted(value), node.func
    if said in _PRINTING or _STREAM.fullmatch(said):
        return f"{ast.unparse(func)}() prints"
    if last_name(func) not in _LEVELS or not isinstance(func, ast.Attribute) or is_own(value):
        return ""
    holder = func.value.func if isinstance(func.value, ast.Call) else func.value
    by_name = bool(_LOGGER_NAME.fullmatch(last_name(holder)))
    by_name = by_name and not said.startswith(("math.", "numpy."))
    return f"{ast.unparse(func)}() logs" if by_name or _LOGGER.fullmatch(said) else ""
