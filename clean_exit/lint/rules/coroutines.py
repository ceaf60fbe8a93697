"""async: coroutines in destructors, which nothing awaits."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Function, children, last_name
from clean_exit.lint.values import Bound, External, Values

_DOTTED = re.compile(
    r"asyncio\.(run|create_task|ensure_future|run_coroutine_threadsafe|gather|wait|wait_for)"
    r"|(anyio|trio)\.(run|from_thread\.run)|asyncio\.Runner\(\)\.run|anyio\.from_thread\.run"
    r"|asgiref\.sync\.async_to_sync(\(\))?"
)
_METHODS = {"run_until_complete", "run_forever", "run_coroutine_threadsafe", "create_task"}


def on_statement(visit: Expressions, frame: Frame, node: ast.AST) -> None:
    """Find a destructor that is a coroutine itself: its body never runs."""
    if isinstance(node, ast.AsyncFunctionDef) and node is frame.function.node:
        visit.report("async", node, "a coroutine that nobody awaits: its body never runs", frame)


def on_call(visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
    """Find coroutines that are made there, and loops that are to run them."""
    for value in values:
        function = value.function if isinstance(value, Bound) else value
        if isinstance(function, Function) and function.is_async and _is_dropped(frame, node):
            visit.report("async", node, f"{function.label}() is never awaited", frame)
            return
    if frame.facts.alive:
        return
    dotted = [value.dotted for value in values if isinstance(value, External)]
    known = [one for one in dotted if _DOTTED.fullmatch(one)]
    name = last_name(node.func)
    if not known and not dotted and not values and name in _METHODS:
        known = [ast.unparse(node.func)] if isinstance(node.func, ast.Attribute) else []
    known += [one for one in dotted if not known and one.rpartition(".")[2] in _METHODS]
    if known:
        visit.report("async", node, f"{known[0]}() needs a loop that still runs", frame)


def _is_dropped(frame: Frame, node: ast.Call) -> bool:
    """Whether a coroutine is made and left, rather than kept or given to somebody."""
    kinds = (ast.Expr, ast.Return) if frame.is_destructor else (ast.Expr,)
    return any(
        isinstance(one, kinds) and one.value is node for one in children(frame.function.body)
    )
