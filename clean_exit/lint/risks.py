"""What can raise while an object is built, as far as a reader would agree that it can."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from clean_exit.lint.catching import is_expected
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.scopes import Class, Function, children, inside, last_name
from clean_exit.lint.values import Bound, Env, External, Instance, Value

# Functions and classes of Python and its library.
_SAFE = {
    "isinstance", "issubclass", "callable", "hasattr", "id", "type", "repr", "str", "bool",
    "object", "super", "print", "len", "range", "zip", "enumerate", "map", "filter", "dict",
    "sorted", "max", "min", "sum", "any", "all", "abs", "round", "reversed", "iter", "property",
    "locals", "globals", "format", "ascii", "slice", "staticmethod", "Lock", "RLock", "Event",
    "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "local", "Thread", "Timer",
    "current_thread", "get_ident", "main_thread", "allocate_lock", "current_process", "StringIO",
    "BytesIO", "deque", "OrderedDict", "defaultdict", "Counter", "ChainMap", "Queue", "SimpleQueue",
    "LifoQueue", "PriorityQueue", "ref", "proxy", "WeakSet", "WeakValueDictionary",
    "WeakKeyDictionary", "WeakMethod", "finalize", "time", "monotonic", "perf_counter", "time_ns",
    "monotonic_ns", "perf_counter_ns", "get_clock_info", "getpid", "getLogger", "count", "partial",
    "extract_stack", "format_stack", "isclass", "isfunction", "ismethod", "iscoroutinefunction",
    "isgeneratorfunction", "iscoroutine", "methodcaller", "attrgetter", "itemgetter", "uuid4",
    "uuid1", "ExitStack", "AsyncExitStack", "nullcontext", "closing", "suppress", "SimpleNamespace",
    "MappingProxyType", "now", "utcnow", "Path", "PurePath", "getrefcount", "exc_info",
    "is_finalizing", "vars", "__setattr__", "_current_frames", "_getframe", "warn", "register",
    "cast", "field",
}  # fmt: skip
# The same, if they are given constants or nothing.
_SAFE_WITH_CONSTANTS = {
    "list", "set", "tuple", "frozenset", "bytearray", "bytes", "int", "float", "ThreadPoolExecutor",
    "ProcessPoolExecutor", "compile", "Struct", "Random", "Decimal", "Fraction", "timedelta",
    "array",
}  # fmt: skip
# Methods of strings, dictionaries, lists and loggers, by whatever name the object goes.
_SAFE_METHODS = {
    "items", "keys", "values", "copy", "append", "add", "setdefault", "lower", "upper", "strip",
    "lstrip", "rstrip", "startswith", "endswith", "format", "debug", "info", "warning", "error",
    "is_set", "acquire", "release", "replace", "split", "join", "encode", "title", "rsplit",
    "partition", "isdigit", "clear", "discard", "extend", "appendleft",
}  # fmt: skip
_SAFE_UNKNOWN = {"partial", "Lock", "RLock", "Event", "Condition", "Queue", "SimpleQueue",
                 "LifoQueue", "deque"}  # fmt: skip
_LIKE_A_DICTIONARY = ("kwargs", "kwds", "kw", "options", "opts", "params", "config", "settings",
                      "environ", "headers", "args", "cfg", "conf", "attrs", "dict")  # fmt: skip
_NEVER_EMPTY = {"split", "rsplit", "partition", "rpartition", "splitext", "extract_stack",
                "exc_info", "stack"}  # fmt: skip
_FURTHEST = 3  # Functions in a row; what is further away can raise, perhaps.


class Risks:
    """Says what can raise; remembers it for the project's own functions."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[tuple[Function, int], bool] = {}
        self._stack: list[Function] = []
        self._met_cycle = False

    def of(self, node: ast.AST, env: Env, depth: int = 0) -> Iterator[ast.AST]:
        """Yield what can raise in an expression, or in a simple statement, in its order."""
        annotation = getattr(node, "annotation", None)
        skipped = set(ast.walk(annotation)) if annotation else set()
        for one in children([node]):
            if one not in skipped and self._is_risky(one, env, depth):
                yield one

    def _is_risky(self, node: ast.AST, env: Env, depth: int) -> bool:
        """Whether a node by itself can raise, its parts aside."""
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Await,
                             ast.Yield, ast.YieldFrom)):  # fmt: skip
            return True
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load) and _item_may_be_missing(node, env)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            is_number = isinstance(getattr(node.left, "value", None), (int, float))
            return is_number and not isinstance(node.right, ast.Constant)
        if isinstance(node, ast.Assign):
            unpacks = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
            return unpacks and not isinstance(node.value, (ast.Tuple, ast.List, ast.Call))
        return isinstance(node, ast.Call) and self._call_is_risky(node, env, depth)

    def _call_is_risky(self, node: ast.Call, env: Env, depth: int) -> bool:
        name, func = last_name(node.func), node.func
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(func, ast.Attribute):
            if name in _SAFE_METHODS or isinstance(func.value, (ast.Constant, ast.JoinedStr)):
                return False
            if name in {"get", "pop"}:  # Where there is no default, such code has looked before.
                return not last_name(func.value).endswith(_LIKE_A_DICTIONARY)
        if name == "getattr" and len(node.args) == 3:
            return False
        value = self._evaluator.evaluate(func, env)
        if value is None and name in {"__init__", "__setattr__"}:
            return False  # A base from elsewhere: what it sets before it raises is not known.
        if value is None:
            return name not in _SAFE_UNKNOWN or bool(given and name != "partial")
        return self._value_is_risky(value, given, depth)

    def _value_is_risky(self, value: Value, given: list[ast.expr], depth: int) -> bool:
        if isinstance(value, External):
            package, name = value.dotted.partition(".")[0], value.dotted.rpartition(".")[2]
            if package not in sys.stdlib_module_names or package == "multiprocessing":
                return True
            # What is written in capitals is a constant.
            plain = all(isinstance(one, ast.Constant) or last_name(one).isupper() for one in given)
            made_only = name.endswith(("Error", "Exception", "Warning"))
            return not (made_only or name in _SAFE or (plain and name in _SAFE_WITH_CONSTANTS))
        if isinstance(value, Class):
            return self._construction_is_risky(value, depth)
        if isinstance(value, Bound):
            return self._function_is_risky(value.function, value.receiver, depth)
        return not isinstance(value, Function) or self._function_is_risky(value, None, depth)

    def _construction_is_risky(self, cls: Class, depth: int) -> bool:
        found = {name: self._evaluator.method(cls, name)
                 for name in ("__new__", "__init__", "__post_init__")}  # fmt: skip
        risky = any(one and self._function_is_risky(one, Instance(cls), depth)
                    for one in found.values())  # fmt: skip
        return risky or not (found["__init__"] or self._evaluator.linear(cls)[1])

    def _function_is_risky(
        self, function: Function, receiver: Instance | Class | None, depth: int
    ) -> bool:
        """Whether a call of one of the project's functions can raise."""
        if function.is_async or function in self._stack:
            self._met_cycle = self._met_cycle or not function.is_async
            return False  # What calls itself raises only where something else does.
        key = (function, depth)
        if depth <= _FURTHEST and key not in self._known:
            outer, self._met_cycle = self._met_cycle, False
            self._stack.append(function)
            env = Env(function, receiver)
            handled = {
                inner
                for one in inside(function.node)
                if isinstance(one, ast.Try)
                for inner in children(one.body)
                if is_expected(inner, one.handlers)
            }
            risky = any(
                one not in handled and not _is_abstract(one)
                for statement in function.body
                for one in self.of(statement, env, depth + 1)
            )
            self._stack.pop()
            if self._met_cycle and not risky:
                return False  # Seen from elsewhere it may be another.
            self._known[key] = risky
            self._met_cycle = outer
        return self._known.get(key, True)


def _is_abstract(node: ast.AST) -> bool:
    """Whether it says that a subclass has to define this, of which nothing else is known."""
    raised = node.exc if isinstance(node, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return last_name(raised) == "NotImplementedError"


def _item_may_be_missing(node: ast.Subscript, env: Env) -> bool:
    """Whether an item by a constant is one that nothing has put there."""
    if not isinstance(node.slice, ast.Constant):
        return False
    if isinstance(node.value, ast.Call) and last_name(node.value.func) in _NEVER_EMPTY:
        return node.slice.value != 0
    said = ast.dump(node.value), node.slice.value
    return not any(
        isinstance(one, ast.Subscript)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.slice, ast.Constant)
        and (ast.dump(one.value), one.slice.value) == said
        for one in inside(env.scope.node if isinstance(env.scope, Function) else node)
    )
