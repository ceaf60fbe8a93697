"""wait: what may never come back, because a lock is held or a thread never ends."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Module, inside, last_name
from clean_exit.lint.values import Value, dotted, is_own

_WAITING = {"join", "join_thread", "result", "acquire", "wait", "shutdown"}
_FUNCTIONS = {"concurrent.futures.wait", "os.wait", "os.waitpid", "signal.pause", "os.waitid",
              "multiprocessing.connection.wait"}  # fmt: skip
_LOCK_NAME = re.compile(r"(^|[_.a-z])(r?lock|mutex|semaphore|sem|condition|cond|cv)s?$", re.I)
_LOCKS = re.compile(
    r"(threading|multiprocessing|_thread|asyncio)\."
    r"(synchronize\.)?(R?Lock|Semaphore|BoundedSemaphore|Condition|allocate_lock)\(\)"
)
# Leaving them waits for what they run.
_JOINING = re.compile(r"concurrent\.futures\.\S*Executor\(\)|subprocess\.Popen\(\)")
# The thread that has it gets it again; so it is only at the end that nobody gives it back.
_REENTRANT = re.compile(r"(threading|multiprocessing)\.(synchronize\.)?(RLock|Condition)\(\)")
_BLOCKING = re.compile(
    r"(queue|multiprocessing|multiprocessing\.queues)\.\w*Queue\(\)\.(get|join)"
    r"|subprocess\.Popen\(\)\.communicate"
)


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls that wait without a limit."""
    if is_own(value) or isinstance(value, Module):
        return ""  # A function of the project: what it does is seen there.
    name, said = last_name(node.func), dotted(value)
    if said in _FUNCTIONS:
        is_polling = any("WNOHANG" in ast.unparse(one) for one in node.args)
        return "" if _has_limit(node, 99) or is_polling else f"{said}() has no timeout"
    if _BLOCKING.fullmatch(said):
        return "" if _has_limit(node, 1) else f"{_shown(node)} has no timeout"
    if name not in _WAITING or not isinstance(node.func, ast.Attribute):
        return ""
    if frame.facts.alive and name == "acquire" and _REENTRANT.match(said):
        return ""
    if said and ("()" not in said or _is_asyncio(said)):
        return ""  # A function of a module elsewhere, such as os.path.join; a coroutine.
    if not _waits(name, node) or _was_killed(frame, node.func.value, node.lineno):
        return ""
    return f"{_shown(node)} has no timeout"


def on_with(frame: Frame, node: ast.expr, value: Value | None) -> str:
    """Find locks that a with block takes."""
    said = dotted(value)
    if is_own(value) or (frame.facts.alive and _REENTRANT.fullmatch(said)):
        return ""
    if isinstance(node, ast.Call):
        by_name = last_name(node.func) == "get_lock"
    else:
        by_name = bool(_LOCK_NAME.search(last_name(node)))
    if by_name or _LOCKS.fullmatch(said):
        return f"with {ast.unparse(node)} waits as long as another holds it"
    joins = _JOINING.fullmatch(said)
    return f"with {ast.unparse(node)} waits until all is done" if joins else ""


def _is_asyncio(dotted: str) -> bool:
    """Whether it is a coroutine or a future of asyncio, which do not block a thread."""
    return dotted.startswith("asyncio.") and "run_coroutine_threadsafe()" not in dotted


def _waits(name: str, node: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if None in keywords or any(isinstance(one, ast.Starred) for one in node.args):
        return False
    if name == "shutdown":
        first = node.args[0] if node.args else keywords.get("wait")
        return first is None or (isinstance(first, ast.Constant) and first.value is True)
    if name == "acquire":
        first = node.args[0] if node.args else keywords.get("blocking")
        blocks = first is None or (isinstance(first, ast.Constant) and first.value is True)
        return blocks and not _has_limit(node, 1)
    return not _has_limit(node, 0)


def _has_limit(node: ast.Call, position: int) -> bool:
    """Whether a call has a timeout, by name or by its place among the arguments."""
    for keyword in node.keywords:
        if keyword.arg in {"timeout", "timeout_s", "blocking", "block", None}:
            value = keyword.value
            # By identity: 1 is a timeout, and True is none.
            never = isinstance(value, ast.Constant) and (value.value is None or value.value is True)
            return not never or keyword.arg is None
    if len(node.args) <= position:
        return False
    value = node.args[position]
    return not (isinstance(value, ast.Constant) and value.value is None)


def _was_killed(frame: Frame, receiver: ast.expr, line: int) -> bool:
    """Whether a process is killed before it is waited for: then it ends by itself."""
    said = ast.dump(receiver)
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "kill"
        and one.lineno <= line
        and ast.dump(one.func.value) == said
        for one in inside(frame.function.node)
    )


def _shown(node: ast.Call) -> str:
    text = ast.unparse(node.func).replace("\n", " ")
    return f"{text if len(text) <= 40 else '...' + text[-37:]}()"
