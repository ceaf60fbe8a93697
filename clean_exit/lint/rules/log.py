"""log: logging and printing, whose files and locks may be gone or held."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Class, Function, last_name
from clean_exit.lint.values import Bound, External, Instance, Values

_LEVELS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
_LOGGER_NAME = re.compile(r"_*(logger|log|logging|loguru)_*|\w*_(logger|log)", re.I)
_PRINTING = {"builtins.print", "traceback.print_exc", "traceback.print_stack", "pprint.pprint",
             "rich.print", "click.echo", "traceback.print_exception", "typer.echo"}  # fmt: skip
_STREAM = re.compile(r"sys\.(__)?(stdout|stderr)(__)?(\.buffer)?\.(write|writelines|flush)")


def on_call(visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
    """Find calls of loggers, by what they are or by their usual names, and prints."""
    if frame.facts.alive:
        return
    dotted = [value.dotted for value in values if isinstance(value, External)]
    name, func = last_name(node.func), node.func
    if any(one in _PRINTING or _STREAM.fullmatch(one) for one in dotted):
        visit.report("log", node, f"{ast.unparse(func)}() prints", frame)
        return
    if name not in _LEVELS or not isinstance(func, ast.Attribute):
        return
    if any(isinstance(value, (Bound, Function, Class, Instance)) for value in values):
        return
    by_type = any(re.match(r"logging(\.|$)|loguru\.|structlog\.", one) for one in dotted)
    holder = func.value.func if isinstance(func.value, ast.Call) else func.value
    by_name = bool(_LOGGER_NAME.fullmatch(last_name(holder))) or last_name(holder) in {
        "getLogger", "get_logger"}  # fmt: skip
    elsewhere = dotted and not by_type and all("()" not in one for one in dotted)
    if by_type or (by_name and not (elsewhere and dotted[0].startswith(("math.", "numpy.")))):
        visit.report("log", node, f"{ast.unparse(func)}() logs", frame)
