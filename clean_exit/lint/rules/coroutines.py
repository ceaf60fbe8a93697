"""async: coroutines in destructors, which nothing awaits."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Function, children
from clean_exit.lint.values import Bound, Value, dotted

_DOTTED = re.compile(
    r"asyncio\.(run|create_task|ensure_future|run_coroutine_threadsafe|gather|wait|wait_for)"
    r"|(anyio|trio)\.(run|from_thread\.run)|asyncio\.Runner\(\)\.run|anyio\.from_thread\.run"
    r"|asgiref\.sync\.async_to_sync(\(\))?"
    r"|.*\.(run_until_complete|run_forever|run_coroutine_threadsafe|create_task)"
)


def on_statement(frame: Frame, node: ast.AST) -> str:
    """Find a destructor that is a coroutine itself: its body never runs."""
    is_it = isinstance(node, ast.AsyncFunctionDef) and node is frame.function.node
    return "a coroutine that nobody awaits: its body never runs" if is_it else ""


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find coroutines that are made there, and loops that are to run them."""
    function = value.function if isinstance(value, Bound) else value
    if isinstance(function, Function) and function.is_async and _is_dropped(frame, node):
        return f"{function.label}() is never awaited"
    said = dotted(value)
    if not value and isinstance(node.func, ast.Attribute):
        said = ast.unparse(node.func)
    runs = _DOTTED.fullmatch(said) and not frame.facts.alive
    return f"{said}() needs a loop that still runs" if runs else ""


def _is_dropped(frame: Frame, node: ast.Call) -> bool:
    """Whether a coroutine is made and left, rather than kept or given to somebody."""
    kinds = (ast.Expr, ast.Return) if frame.is_destructor else (ast.Expr,)
    return any(
        isinstance(one, kinds) and one.value is node for one in children(frame.function.body)
    )
