"""register: what a destructor starts or registers, when it may be too late for both."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Class, Function, last_name
from clean_exit.lint.values import Bound, External, Values

_DOTTED = re.compile(
    r"atexit\.register|threading\.(Thread|Timer|_register_atexit)|_thread\.start_new(_thread)?"
    r"|concurrent\.futures\.(thread\.|process\.)?\w+Executor|multiprocessing\.(Process|Pool)"
    r"|multiprocessing\.(pool\.(Pool|ThreadPool)|dummy\.Pool)|weakref\.finalize"
    r"|asyncio\.(create_task|ensure_future|run_coroutine_threadsafe|to_thread)"
    r"|(threading\.(Thread|Timer)|multiprocessing\.Process)\(\)\.start"
    r"|concurrent\.futures\.\S*Executor\(\)\.(submit|map)"
)
_METHODS = {"create_task", "ensure_future", "run_in_executor", "call_soon_threadsafe",
            "start_soon"}  # fmt: skip
_EXECUTOR = re.compile(r"\w*(executor|pool)", re.I)


def on_call(visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
    """Find what starts threads, processes and tasks, and registrations."""
    if frame.facts.alive:
        return
    dotted = [value.dotted for value in values if isinstance(value, External)]
    known = [one for one in dotted if _DOTTED.fullmatch(one)]
    name = last_name(node.func)
    if not known and isinstance(node.func, ast.Attribute):
        if any(isinstance(value, (Bound, Function, Class)) for value in values):
            return
        holder = last_name(node.func.value)
        if name in _METHODS or (name == "submit" and _EXECUTOR.fullmatch(holder)):
            known = [ast.unparse(node.func)]
    if known:
        registers = known[0] in {"atexit.register", "weakref.finalize"}
        verb = "registers" if registers else "starts"
        what = "what may never be called" if registers else "what can no longer run"
        visit.report("register", node, f"{known[0]}() {verb} {what}", frame)
