"""register: what a destructor starts or registers, when it may be too late for both."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import last_name
from clean_exit.lint.values import Value, dotted, is_own

_DOTTED = re.compile(
    r"atexit\.register|threading\.(Thread|Timer|_register_atexit)|_thread\.start_new(_thread)?"
    r"|concurrent\.futures\.(thread\.|process\.)?\w+Executor|multiprocessing\.(Process|Pool)"
    r"|multiprocessing\.(pool\.(Pool|ThreadPool)|dummy\.Pool)|weakref\.finalize"
    r"|asyncio\.(create_task|ensure_future|run_coroutine_threadsafe|to_thread)"
    r"|(threading\.(Thread|Timer)|multiprocessing\.Process)\(\)\.start"
    r"|concurrent\.futures\.\S*Executor\(\)\.(submit|map)"
)
_NAMED = re.compile(
    r".*\.(create_task|ensure_future|run_in_executor|call_soon_threadsafe|start_soon)"
    r"|(.*\.)?\w*(executor|pool)\.submit", re.I | re.S
)  # fmt: skip


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find what starts threads, processes and tasks, and registrations."""
    if frame.facts.alive:
        return ""
    said = dotted(value)
    if not _DOTTED.fullmatch(said):
        if is_own(value) or not isinstance(node.func, ast.Attribute):
            return ""
        if not _NAMED.fullmatch(f"{last_name(node.func.value)}.{node.func.attr}"):
            return ""
        said = ast.unparse(node.func)
    if said in {"atexit.register", "weakref.finalize"}:
        return f"{said}() registers what may never be called"
    return f"{said}() starts what can no longer run"
