"""The rules for destructors: each function looks at one node and returns a message, or "".

`frame` is the function on the way from the destructor and what is known at that point. The rules
about callbacks, which apply outside of destructors too, are in `callbacks`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

from clean_exit.lint.evaluator import Bound, Instance, Super, Value, dotted, is_project_value
from clean_exit.lint.frames import Frame
from clean_exit.lint.handlers import ancestors, exception_names, is_suppress, suppressed_names
from clean_exit.lint.scopes import Class, Function, Module, children, inside, last_name

# import

_IMPORTING = {"importlib.import_module", "importlib.__import__", "importlib.reload",
              "builtins.__import__", "importlib.util.find_spec"}  # fmt: skip


def import_statement(frame: Frame, node: ast.AST) -> str:
    """Find import statements, with or without a handler: the cleanup that needs them fails."""
    if frame.is_alive or not isinstance(node, (ast.Import, ast.ImportFrom)):
        return ""
    if isinstance(node, ast.ImportFrom):
        return f"import {'.' * node.level}{node.module or ''}"
    return "import " + ", ".join(alias.name for alias in node.names)


def import_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find imports by a function call."""
    if dotted(value) not in _IMPORTING or frame.is_alive:
        return ""
    return f"import by {dotted(value)}({ast.unparse(node.args[0]) if node.args else ''})"


# global


def global_name(frame: Frame, node: ast.Name) -> str:
    """Find names that are looked up in a module and were not compared with None first."""
    is_special = node.id.startswith("__") and node.id.endswith("__")
    if frame.is_alive or is_special or node.id in frame.facts:
        return ""
    if frame.named(node.id).kind != "global":
        return ""
    frame.facts |= {node.id}  # One finding is enough.
    return f"the global {node.id} may be None during shutdown"


# partial-init


def missing_attribute(frame: Frame, node: ast.expr, name: str) -> str:
    """Find attributes that are used without a guard and may not have been set."""
    if name in frame.used | frame.stored or frame.catches("AttributeError"):
        return ""
    if any(one.isidentifier() for one in frame.facts):
        return ""  # What global names have shown or done before is not known.
    changed = {one[1:] for one in frame.facts if one.startswith(".")}
    why = frame.construction.why_missing(name, frame.used, changed)
    if why is None:
        return ""
    if isinstance(why, str):
        if len(frame.trace) > 2 or why in {step.name for step in frame.trace}:
            return ""  # A function on the way may have set it.
        return f"__init__ does not set self.{name}; {why}() does"
    line = f"line {getattr(why.node, 'lineno', 0)}"
    if why.where.module is not frame.function.module:
        line += f" of {PurePath(why.where.module.source.path).name}"
    if not isinstance(why.node, ast.Call):
        return f"self.{name} is missing if {line} raises"
    return f"self.{name} is missing if {_short_name(why.node)} fails in {line}"


# signature


def wrong_signature(frame: Frame, node: ast.AST) -> str:
    """Find a destructor with parameters that Python does not pass."""
    if node is not frame.function.node or not frame.is_destructor:
        return ""
    function = frame.function
    missing = [*function.parameters[1:], *(one.arg for one in function.node.args.kwonlyargs)]
    missing = [name for name in missing if name not in function.defaults]
    if missing:
        return f"Python calls it without a value for {', '.join(missing)}"
    takes_object = function.parameters or function.node.args.vararg
    return "" if takes_object else "it does not take the object, which Python passes"


def missing_super(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find ``super().__del__()`` where no base class has a destructor."""
    func, function = node.func, frame.function
    if not isinstance(func, ast.Attribute) or func.attr != "__del__" or not function.owner:
        return ""
    if not isinstance(frame.evaluate(func.value), Super) or value is not None:
        return ""
    _, is_complete = frame.evaluator.mro(frame.destroyed)
    is_tested = any(
        isinstance(one, ast.Constant) and one.value == "__del__" for one in inside(function.node)
    )
    if not is_complete or is_tested or frame.catches("AttributeError"):
        return ""
    return f"no base class of {frame.destroyed.name} has a destructor"


# blocking-call

_SLOW = re.compile(
    r"time\.sleep|os\.(system|popen|spawn\w+)|urllib\.request\.(urlopen|urlretrieve)"
    r"|subprocess\.(run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|(requests|httpx)\.(api\.)?(get|post|put|patch|delete|head|options|request|stream)"
    r"|socket\.create_connection"
)
_SHORT_S = 0.1
_WAITING = {"join", "join_thread", "result", "acquire", "wait", "shutdown"}
_WAITING_FUNCTIONS = {"concurrent.futures.wait", "os.wait", "os.waitpid", "signal.pause",
                      "os.waitid", "multiprocessing.connection.wait"}  # fmt: skip
_LOCK_NAME = re.compile(r"(^|[_.a-z])(r?lock|mutex|semaphore|sem|condition|cond|cv)s?$", re.I)
_LOCKS = re.compile(
    r"(threading|multiprocessing|_thread|asyncio)\."
    r"(synchronize\.)?(R?Lock|Semaphore|BoundedSemaphore|Condition|allocate_lock)\(\)"
)
# Leaving the block of one of these waits for the work that it runs.
_JOINING = re.compile(r"concurrent\.futures\.\S*Executor\(\)|subprocess\.Popen\(\)")
_EXECUTOR = re.compile(r"executor|pool", re.I)
# The thread that holds one can take it again, so a destructor in that thread does not block.
_REENTRANT = re.compile(r"(threading|multiprocessing)\.(synchronize\.)?(RLock|Condition)\(\)")
_BLOCKING = re.compile(
    r"(queue|multiprocessing|multiprocessing\.queues)\.\w*Queue\(\)\.(get|join)"
    r"|subprocess\.Popen\(\)\.communicate"
)


def waiting_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls that wait without a timeout."""
    if is_project_value(value) or isinstance(value, Module):
        return ""  # The walk enters functions of the project.
    name, target = last_name(node.func), dotted(value)
    if _SLOW.fullmatch(target) and not _is_short(target, node):
        return f"{target}() blocks the thread that drops the object"
    if target in _WAITING_FUNCTIONS:
        is_polling = any("WNOHANG" in ast.unparse(one) for one in node.args)
        return "" if _has_limit(frame, node, 99) or is_polling else f"{target}() has no timeout"
    if _BLOCKING.fullmatch(target):
        return "" if _has_limit(frame, node, 1) else f"{_short_name(node)} has no timeout"
    if name not in _WAITING or not isinstance(node.func, ast.Attribute):
        return ""
    if name == "acquire":
        holder = node.func.value
        is_lock = _LOCK_NAME.search(last_name(holder)) or target.endswith("().acquire")
        if not is_lock or _REENTRANT.match(target) or _is_own_lock(frame, holder):
            return ""
    is_coroutine = target.startswith("asyncio.") and "run_coroutine_threadsafe()" not in target
    if target and ("()" not in target or is_coroutine):
        return ""  # A coroutine, or another module's function such as os.path.join.
    if not _waits(frame, name, node) or _was_killed(frame, node.func.value, node.lineno):
        return ""
    if name == "shutdown" and not _EXECUTOR.search(target or ast.unparse(node.func.value)):
        return ""  # Of a server or a model, which may not wait.
    return f"{_short_name(node)} has no timeout"


def waiting_block(frame: Frame, node: ast.expr, value: Value | None) -> str:
    """Find locks and executors in the head of a with block."""
    target = dotted(value)
    if is_project_value(value) or _REENTRANT.fullmatch(target) or _is_own_lock(frame, node):
        return ""
    if _LOCK_NAME.search(last_name(node)) or _LOCKS.fullmatch(target):
        return f"with {ast.unparse(node)} waits as long as another thread holds it"
    joins = _JOINING.fullmatch(target)
    return f"with {ast.unparse(node)} waits until all of its work is done" if joins else ""


def _is_short(target: str, node: ast.Call) -> bool:
    """Whether a call sleeps for a moment, or for a time that is computed, as a loop does."""
    first = node.args[0] if node.args else None
    seconds = getattr(first, "value", None)
    is_long = isinstance(seconds, (int, float)) and seconds > _SHORT_S
    return target == "time.sleep" and not is_long


def _is_own_lock(frame: Frame, node: ast.expr) -> bool:
    """Whether a lock belongs to the destroyed object, or to one that it has made.

    Nobody else holds that lock by then.
    """
    owner = frame.evaluate(node.value) if isinstance(node, ast.Attribute) else None
    if not isinstance(owner, Instance) or not (owner.is_self or owner.is_new):
        return False
    is_shared = frame.evaluator.member(owner.cls, node.attr)  # type: ignore[attr-defined]
    return not is_shared and bool(_LOCKS.fullmatch(dotted(frame.evaluate(node))))


def _waits(frame: Frame, name: str, node: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if None in keywords or any(isinstance(one, ast.Starred) for one in node.args):
        return False
    option = {"shutdown": "wait", "acquire": "blocking"}.get(name)
    if option is None:
        return not _has_limit(frame, node, 0)
    first = node.args[0] if node.args else keywords.get(option)
    waits = first is None or _constant(frame, first) is True
    return waits and (name == "shutdown" or not _has_limit(frame, node, 1))


def _has_limit(frame: Frame, node: ast.Call, position: int) -> bool:
    """Whether a call has a timeout, as a keyword or as the argument at a position."""
    for keyword in node.keywords:
        if keyword.arg in {"timeout", "timeout_s", "blocking", "block", None}:
            # By identity: 1 is a timeout and True is not.
            value = _constant(frame, keyword.value)
            return keyword.arg is None or not (value is None or value is True)
    return len(node.args) > position and _constant(frame, node.args[position]) is not None


def _constant(frame: Frame, node: ast.expr) -> object:
    """Return the value of a constant, or of a parameter with a known one; else the node."""
    if isinstance(node, ast.Name):
        return frame.constants.get(node.id, node)
    return node.value if isinstance(node, ast.Constant) else node


def _was_killed(frame: Frame, receiver: ast.expr, line: int) -> bool:
    """Whether a process is told to end before the call that waits for it."""
    dump = ast.dump(receiver)
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in {"kill", "terminate"}
        and one.lineno <= line
        and ast.dump(one.func.value) == dump
        for one in inside(frame.function.node)
    )


def _short_name(node: ast.Call) -> str:
    text = ast.unparse(node.func).replace("\n", " ")
    return f"{text if len(text) <= 40 else '...' + text[-37:]}()"


# device-call

_DEVICE = re.compile(
    r"torch\.(cuda|xpu|mps|mtia|npu|hpu|musa|accelerator)\..*"
    r"|torch\._C\._?(cuda|cudart|gds|xpu|mps|mtia|accelerator|nccl).*"
    r"|torch\.distributed\.(destroy_process_group|barrier|all_reduce)"
    r"|(cupy|pycuda|numba\.cuda|cuda\.bindings)\..*|pynvml\.nvml\w+|gc\.collect"
)
# These only query a state, or release what the object itself holds.
_HARMLESS = re.compile(
    r".*\.(is_initialized|is_built|_is_compiled|is_current_stream_capturing"
    r"|\w*([Rr]elease|[Dd]eregister|[Uu]nregister|[Uu]nload|[Dd]estroy|[Ff]ree)\w*)"
)
_DEVICE_METHODS = re.compile(
    r"synchronize|empty_cache|ipc_collect|cuda"
    r"|(cuda|nccl|nvml|hip)[A-Z]\w*|(cublas|cudnn|cufft|cusparse)\w+"
    r"|cu(Mem|Ctx|Stream|Event|Module|Graph|Init|Array|Link|Launch)[A-Z]?\w*"
)


def device_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls of a device, by the function or by method names that only devices have."""
    if frame.is_alive:
        return ""
    target = dotted(value)
    if not _DEVICE.fullmatch(target) or _HARMLESS.fullmatch(target):
        method = getattr(node.func, "attr", "")
        is_known = is_project_value(value) or method.endswith("Unregister")
        if is_known or not _DEVICE_METHODS.fullmatch(method):
            return ""
        target = ast.unparse(node.func)
    return f"{target}() {'collects garbage' if target == 'gc.collect' else 'calls the device'}"


# log

_LEVELS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
_LOGGER_NAME = re.compile(
    r"_*(logger|log|logging|loguru)_*|\w*_(logger|log)|getlogger|get_logger", re.I
)
_LOGGER = re.compile(r"(logging|loguru|structlog)(\.|$).*")
_PRINTING = {"builtins.print", "traceback.print_exc", "traceback.print_stack", "pprint.pprint",
             "rich.print", "click.echo", "traceback.print_exception", "typer.echo"}  # fmt: skip
_STREAM = re.compile(r"sys\.(__)?(stdout|stderr)(__)?(\.buffer)?\.(write|writelines|flush)")


def logging_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find printing and logging, also by the usual names of loggers."""
    if frame.is_alive:
        return ""
    target, func = dotted(value), node.func
    if target in _PRINTING or _STREAM.fullmatch(target):
        return f"{ast.unparse(func)}() prints"
    is_method = isinstance(func, ast.Attribute) and not is_project_value(value)
    if last_name(func) not in _LEVELS or not is_method:
        return ""
    holder = func.value.func if isinstance(func.value, ast.Call) else func.value  # type: ignore[attr-defined]
    by_name = bool(_LOGGER_NAME.fullmatch(last_name(holder)))
    return f"{ast.unparse(func)}() logs" if by_name or _LOGGER.fullmatch(target) else ""


# raise


def raising_statement(frame: Frame, node: ast.AST) -> str:
    """Find ``raise`` and ``assert`` that no handler on the way catches."""
    if not frame.is_destructor and (frame.conditions or len(frame.trace) > 2):
        return ""  # It depends on the arguments, or on what the destructor has tested.
    if isinstance(node, ast.Assert):
        caught = frame.catches("AssertionError")
        return "" if caught or not frame.is_destructor else "the AssertionError is printed and lost"
    if not isinstance(node, ast.Raise):
        return ""
    if node.exc is None:
        return ""  # Without the handler, Python would print the error as well.
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = last_name(raised)
    if not frame.is_destructor and name in {"NotImplementedError", "StopIteration"}:
        return ""  # An abstract method, or the end of a generator.
    above = _catching_names(frame, raised, name)
    is_caught = bool(frame.caught & above)
    is_caught = is_caught or ("Exception" in above and frame.catches())
    return "" if is_caught else f"{name or 'the exception'} is printed and lost"


def _catching_names(frame: Frame, node: ast.AST, name: str) -> set[str]:
    """Return the names of the classes that catch an exception."""
    value = frame.evaluate(node)
    if not isinstance(value, Class):
        return ancestors(name)
    order, _ = frame.evaluator.mro(value)
    bases = [last_name(base) for cls in order for base in cls.node.bases]
    return {cls.name for cls in order}.union(*map(ancestors, bases))


# register

_STARTING = re.compile(
    r"atexit\.register|threading\.(Thread|Timer|_register_atexit)|_thread\.start_new(_thread)?"
    r"|concurrent\.futures\.(thread\.|process\.)?\w+Executor|multiprocessing\.(Process|Pool)"
    r"|multiprocessing\.(pool\.(Pool|ThreadPool)|dummy\.Pool)|weakref\.finalize"
    r"|asyncio\.(create_task|ensure_future|run_coroutine_threadsafe|to_thread)"
    r"|(threading\.(Thread|Timer)|multiprocessing\.Process)\(\)\.start"
    r"|concurrent\.futures\.\S*Executor\(\)\.(submit|map)"
)
_STARTING_METHODS = re.compile(
    r".*\.(create_task|ensure_future|run_in_executor|start_soon)"
    r"|(.*\.)?\w*(executor|pool)\.submit", re.I | re.S
)  # fmt: skip


def registering_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls that start threads, processes and tasks, or register callbacks."""
    if frame.is_alive:
        return ""
    target = dotted(value)
    if not _STARTING.fullmatch(target):
        if is_project_value(value) or not isinstance(node.func, ast.Attribute):
            return ""
        if not _STARTING_METHODS.fullmatch(f"{last_name(node.func.value)}.{node.func.attr}"):
            return ""
        target = ast.unparse(node.func)
    if target in {"atexit.register", "weakref.finalize"}:
        return f"{target}() registers a callback that may never run"
    return f"{target}() starts work that may never run"


# async

_RUNNING = re.compile(
    r"asyncio\.(run|create_task|ensure_future|run_coroutine_threadsafe|gather|wait|wait_for)"
    r"|(anyio|trio)\.(run|from_thread\.run)|asyncio\.Runner\(\)\.run|anyio\.from_thread\.run"
    r"|asgiref\.sync\.async_to_sync(\(\))?"
    r"|.*\.(run_until_complete|run_forever|run_coroutine_threadsafe|create_task)"
)


def async_destructor(frame: Frame, node: ast.AST) -> str:
    """Find a destructor that is a coroutine function."""
    is_destructor = isinstance(node, ast.AsyncFunctionDef) and node is frame.function.node
    return "nothing awaits the coroutine, so its body never runs" if is_destructor else ""


def async_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find coroutines that nothing awaits, and calls that run one in an event loop."""
    function = value.function if isinstance(value, Bound) else value
    if isinstance(function, Function) and function.is_async and _is_dropped(frame, node):
        return f"{function.label}() is never awaited"
    target = dotted(value)
    if not value and isinstance(node.func, ast.Attribute):
        target = ast.unparse(node.func)
    runs = _RUNNING.fullmatch(target) and not frame.is_alive
    return f"{target}() fails if this thread's loop runs, or has ended" if runs else ""


def _is_dropped(frame: Frame, node: ast.Call) -> bool:
    """Whether the coroutine that a call creates is neither stored nor passed on."""
    kinds = (ast.Expr, ast.Return) if frame.is_destructor else (ast.Expr,)
    return any(
        isinstance(one, kinds) and one.value is node for one in children(frame.function.body)
    )


# bare-except


def bare_except(frame: Frame, node: ast.AST) -> str:
    """Find ``except:`` and ``except BaseException:`` that neither raise again nor use the error."""
    if not isinstance(node, ast.ExceptHandler):
        return ""
    names = exception_names(node)
    catches_all = "BaseException" in names or {"Exception", "KeyboardInterrupt"} <= names
    raises = any(isinstance(one, ast.Raise) for one in children(node.body))
    if not catches_all or raises or node.name:
        return ""
    clause = "except:" if node.type is None else f"except {ast.unparse(node.type)}:"
    return f"{clause} hides Ctrl-C and every error"


def wide_suppress(frame: Frame, node: ast.expr, value: Value | None) -> str:
    """Find ``suppress(BaseException)``."""
    is_wide = is_suppress(node, value) and "BaseException" in suppressed_names(node)
    return "suppress(BaseException) hides Ctrl-C and every error" if is_wide else ""


Rules = Sequence[tuple[str, Callable[..., str]]]

STATEMENTS: Rules = (
    ("import", import_statement),
    ("raise", raising_statement),
    ("async", async_destructor),
    ("bare-except", bare_except),
    ("signature", wrong_signature),
)
CALLS: Rules = (
    ("signature", missing_super),
    ("import", import_call),
    ("blocking-call", waiting_call),
    ("device-call", device_call),
    ("log", logging_call),
    ("register", registering_call),
    ("async", async_call),
)
NAMES: Rules = (("global", global_name),)
ATTRIBUTES: Rules = (("partial-init", missing_attribute),)
WITHS: Rules = (("blocking-call", waiting_block), ("bare-except", wide_suppress))
