"""The rules: each is one function over a class and what its destructor reaches.

A rule yields the visit of a node, and a message. `finalize_keeps_alive` looks at a whole file,
because finalizers are created outside of destructors.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from typing import cast

from clean_exit.lint.classes import (
    Destructible,
    Function,
    Module,
    Visit,
    assigned,
    decorators,
    inside,
    is_none,
    last_name,
    own_attribute,
    stored_names,
)
from clean_exit.lint.construction import Construction

Found = Iterator[tuple[Visit, str]]
_IMPORTING = {"importlib.import_module", "importlib.reload", "importlib.util.find_spec"}


def find_imports(cls: Destructible) -> Found:
    """Find imports, with or without a handler: the cleanup that needs them fails."""
    for visit in cls.reached:
        node = visit.node
        if visit.is_alive:
            continue
        if isinstance(node, ast.ImportFrom):
            yield visit, f"import {'.' * node.level}{node.module or ''}"
        elif isinstance(node, ast.Import):
            yield visit, "import " + ", ".join(alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            name = cls.module.dotted(node.func) or last_name(node.func)
            if name == "__import__" or name in _IMPORTING:
                yield visit, f"import by {name}({', '.join(map(ast.unparse, node.args[:1]))})"


def find_globals(cls: Destructible) -> Found:
    """Find names that the module itself sets to None, and all names of an object that is kept."""
    keeper, tested = _keeper(cls), set[str]()
    for visit in cls.reached:
        node = visit.node
        if not isinstance(node, ast.Name) or visit.is_alive or node.id in tested:
            continue
        values, function = cls.module.bound.get(node.id), visit.function
        parameters = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        if values is None or node.id in parameters | stored_names(function):
            continue
        tested.add(node.id)  # A test of a name is a guard for it, whatever it asks.
        if visit.is_test:
            continue
        if any(map(is_none, values)):
            yield visit, f"the module sets {node.id} to None"
        elif keeper:
            yield visit, f"{node.id} may be None when {keeper} is destroyed during shutdown"
            keeper = ""  # One change of the class ends them all.


def _keeper(cls: Destructible) -> str:
    """Return the name in this module or another one that holds an object of the class, or ""."""
    for node in inside(cls.module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            is_kept = isinstance(target, ast.Name) or cls.module.dotted(target)
            if is_kept and last_name(node.value.func) == cls.node.name:
                return ast.unparse(target)
    return ""


def find_missing_attributes(cls: Destructible) -> Found:
    """Find attributes that are missing, or still None, if ``__init__`` failed."""
    built = Construction(cls)
    if not built.is_known:
        return
    seen, dereferenced = set[str](), set[ast.AST]()
    for visit in cls.reached:
        node, name = visit.node, own_attribute(visit.function, visit.node)
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            dereferenced.add(node.value)
        elif isinstance(node, ast.Call):
            dereferenced.add(node.func)
        elif isinstance(node, (ast.For, ast.With)):
            heads = [one.context_expr for one in getattr(node, "items", ())]
            dereferenced.update(heads or [node.iter])  # type: ignore[union-attr]
        elif isinstance(node, ast.Constant):
            seen.add(str(node.value))  # As in hasattr(self, "pool").
        if not name or name in seen or name in cls.methods:
            continue
        is_caught = visit.is_guarded or visit.catches("AttributeError")
        if isinstance(node.ctx, ast.Load) and not is_caught:  # type: ignore[attr-defined]
            what, why = "is missing", built.why_missing(name, seen)
            if why is None and node in dereferenced and not visit.catches("TypeError"):
                what, why = "is None", built.why_none(name, seen)
                if why is None:
                    continue  # It may be dereferenced later.
            if isinstance(why, str) and why in {one.name for one in visit.trace}:
                why = None
            if why is not None:
                when = f"until {why}() sets it" if isinstance(why, str) else f"if {why}"
                yield visit, f"self.{name} {what} {when}"
        if node in dereferenced or name not in cls.defaults:
            seen.add(name)


# blocking-call

_SLOW = re.compile(
    r"os\.(system|popen|spawn\w+)|urllib\.request\.(urlopen|urlretrieve)"
    r"|subprocess\.(run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|(requests|httpx)\.(api\.)?(get|post|put|patch|delete|head|options|request|stream)"
    r"|socket\.create_connection"
)
_SHORT_S = 0.1
_WAITING = {"join", "join_thread", "result", "wait", "acquire", "shutdown", "communicate"}
_LOCK = re.compile(r"(^|[_.a-z])(lock|mutex|semaphore|sem)s?$", re.I)
_EXECUTOR = re.compile(r"executor|pool", re.I)
_REENTRANT = re.compile(r".*\b(RLock|Condition)")


def find_waits(cls: Destructible) -> Found:
    """Find calls and locks that wait without a timeout."""
    ended, tested = set[str](), set[str]()
    for visit in cls.reached:
        node = visit.node
        if visit.is_test:
            tested.add(getattr(node, "id", ""))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if _is_shared_lock(cls, visit, item.context_expr):
                    name = ast.unparse(item.context_expr)
                    yield visit, f"with {name} waits as long as another thread holds it"
        if not isinstance(node, ast.Call):
            continue
        target, method = cls.module.dotted(node.func), last_name(node.func)
        is_function = target and "()" not in target  # Else it is a method of what a call returns.
        if method in {"kill", "terminate"} and isinstance(node.func, ast.Attribute):
            ended.add(ast.unparse(node.func.value))
        seconds = getattr(node.args[0], "value", None) if node.args else None
        is_long = isinstance(seconds, (int, float)) and seconds > _SHORT_S
        if _SLOW.fullmatch(target) or (target == "time.sleep" and is_long):
            yield visit, f"{target}() blocks the thread that drops the object"
        elif target in {"os.wait", "os.waitpid", "signal.pause"}:
            if "WNOHANG" not in ast.unparse(node):
                yield visit, f"{target}() has no timeout"
        elif _has_limit(visit, 1 if is_function or method == "communicate" else 0, tested):
            continue
        elif target in {"concurrent.futures.wait", "multiprocessing.connection.wait"}:
            yield visit, f"{target}() has no timeout"
        elif isinstance(node.func, ast.Attribute) and method in _WAITING and not is_function:
            holder = node.func.value
            name = ast.unparse(holder)
            if method == "acquire" and not _is_shared_lock(cls, visit, holder):
                continue
            if method == "shutdown" and not _EXECUTOR.search(last_name(holder)):
                continue  # Of a server or a model, which may not wait.
            is_method = own_attribute(visit.function, node.func) in cls.methods
            if (
                name not in {*ended, *visit.done}
                and not is_method
                and not isinstance(holder, ast.Constant)
            ):
                yield visit, f"{name}.{method}() has no timeout"


def _has_limit(visit: Visit, first: int, tested: set[str]) -> bool:
    """Whether a call has a timeout or does not wait, or its arguments are not known.

    Args:
        visit: The visit of the call.
        first: The position of the first argument that may be a timeout.
        tested: The names in tests so far, which may not be None.
    """
    node, function = cast(ast.Call, visit.node), visit.function
    none = _none_by_default(function.args) if visit.is_default else set()
    none -= tested | stored_names(function)
    limits = {"timeout", "timeout_s", "blocking", "block", "wait", None}
    values = [*node.args[first:], *(one.value for one in node.keywords if one.arg in limits)]
    return any(
        getattr(one, "id", "") not in none if not isinstance(one, ast.Constant)
        else one.value is not None and one.value is not True
        for one in values
    )  # fmt: skip


def _none_by_default(arguments: ast.arguments) -> set[str]:
    """Return the parameters with the default None."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    pairs = zip(reversed(named), reversed(defaults), strict=False)
    return {one.arg for one, default in pairs if is_none(default)}


def _is_shared_lock(cls: Destructible, visit: Visit, node: ast.expr) -> bool:
    """Whether an expression is a lock that other objects have too, and that is not reentrant."""
    if not _LOCK.search(last_name(node)):
        return False
    name = own_attribute(visit.function, node)
    made = [*cls.module.bound.get(last_name(node), ()), cls.defaults.get(name)]
    for method in itertools.chain(*cls.definitions.values()) if name else ():  # Also of bases.
        pairs = (pair for one in inside(method) for pair in assigned(method, one))
        made += [value for key, value in pairs if key == name]
    texts = [ast.unparse(one) for one in made if one is not None]
    is_own = name not in ("", *cls.defaults) and any(text.endswith("Lock()") for text in texts)
    return not is_own and not any(map(_REENTRANT.search, texts))


# device-call

_DEVICE = re.compile(
    r"torch\.(cuda|xpu|mps|mtia|npu|hpu|musa|accelerator)\..*"
    r"|torch\.distributed\.(destroy_process_group|barrier|all_reduce)"
    r"|(cupy|pycuda|numba\.cuda|cuda\.bindings)\..*|pynvml\.nvml\w+|gc\.collect"
)
# These only query a state, or release what the object itself holds.
_HARMLESS = re.compile(
    r".*\.(is_initialized|is_built|_is_compiled|is_current_stream_capturing"
    r"|\w*([Rr]elease|[Dd]eregister|[Uu]nregister|[Uu]nload|[Dd]estroy|[Ff]ree)\w*)"
)
_DEVICE_METHODS = {"synchronize", "empty_cache", "ipc_collect"}


def find_device_calls(cls: Destructible) -> Found:
    """Find calls of a device, and garbage collections."""
    for visit in cls.reached:
        node = visit.node
        if not isinstance(node, ast.Call) or visit.is_alive:
            continue
        target = cls.module.dotted(node.func)
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _DEVICE_METHODS
        if _DEVICE.fullmatch(target) and not _HARMLESS.fullmatch(target):
            does = "collects garbage" if target == "gc.collect" else "calls the device"
            yield visit, f"{target}() {does}"
        elif is_method and own_attribute(visit.function, node.func) not in cls.methods:
            yield visit, f"{ast.unparse(node.func)}() calls the device"


# async

_RUNNING = re.compile(
    r"asyncio\.(run|create_task|ensure_future|run_coroutine_threadsafe)|(anyio|trio)\.run"
    r"|(.*\.)?(run_until_complete|run_forever|run_coroutine_threadsafe|create_task)"
)


def find_coroutines(cls: Destructible) -> Found:
    """Find coroutines that nothing awaits, and calls that run one in an event loop."""
    for visit in cls.reached:
        node = visit.node
        dropped: ast.AST | None = node if node is cls.methods["__del__"] else None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not visit.is_guarded:
            dropped = cls.called(visit.function, node.value)
        if isinstance(dropped, ast.AsyncFunctionDef):
            yield visit, f"nothing awaits {dropped.name}(), so its body never runs"
        elif isinstance(node, ast.Call) and not visit.is_alive:
            name = cls.module.dotted(node.func) or ast.unparse(node.func)
            if _RUNNING.fullmatch(name):
                yield visit, f"{name}() fails if this thread's loop runs, or has ended"


# finalize-keeps-alive


def find_kept_objects(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Find ``weakref.finalize`` with a callback or argument that refers to the object."""
    classes = [one for one in ast.walk(module.tree) if isinstance(one, ast.ClassDef)]
    owners = {method: cls for cls in classes for method in cls.body}
    for function in ast.walk(module.tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in inside(function):
            if isinstance(node, ast.Call) and module.dotted(node.func) == "weakref.finalize":
                values = _values(owners.get(function))
                target, *rest = [*node.args, *(one.value for one in node.keywords)] or [node]
                roots = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
                held = (one for one in rest if _holds(function, one, roots, values, one is rest[0]))
                if isinstance(target, (ast.Name, ast.Attribute)) and (one := next(held, None)):
                    name, text = ast.unparse(target), ast.unparse(one)
                    yield node, f"{name} is never collected: its finalizer holds it by {text}"


def _holds(
    function: Function, node: ast.AST, roots: set[str], values: set[str], is_callback: bool
) -> bool:
    """Whether an argument of a finalizer refers to the object, or to what holds it."""
    if isinstance(node, ast.Name):
        inner = [one for one in inside(function) if getattr(one, "name", "") == node.id]
        return node.id in roots or any(_holds(function, one, roots, values, True) for one in inner)
    if isinstance(node, ast.Attribute):  # A bound method, unless it is known to be a value.
        is_own = isinstance(node.value, ast.Name) and node.value.id in roots
        return is_own and is_callback and node.attr not in values
    if isinstance(node, (ast.Lambda, ast.FunctionDef)):
        parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        body = node.body if isinstance(node.body, list) else [node.body]
        names = {n.id for part in body for n in ast.walk(part) if isinstance(n, ast.Name)}
        return not roots.isdisjoint(names - parameters)
    is_partial = isinstance(node, ast.Call) and last_name(node.func) in {"partial", "MethodType"}
    arguments = node.args if is_partial else []  # type: ignore[attr-defined]
    return any(_holds(function, one, roots, values, True) for one in arguments)


def _values(cls: ast.ClassDef | None) -> set[str]:
    """Return the attributes that are not bound methods: what is set, and static methods."""
    found = set[str]()
    for one in ast.walk(cls) if cls is not None else ():
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found.add(one.attr)
        elif isinstance(one, ast.FunctionDef) and decorators(one) & {"staticmethod", "classmethod"}:
            found.add(one.name)
    return found


RULES_FOR_CLASSES: dict[str, Callable[[Destructible], Found]] = {
    "import": find_imports,
    "global": find_globals,
    "partial-init": find_missing_attributes,
    "blocking-call": find_waits,
    "device-call": find_device_calls,
    "async": find_coroutines,
}
