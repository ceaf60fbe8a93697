"""What can raise while an object is built, as far as a reader would agree that it can."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from clean_exit.lint.catching import is_expected
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.scopes import Class, Function, children, inside, last_name
from clean_exit.lint.values import Bound, Env, External, Instance

_SAFE_BUILTINS = {
    "isinstance", "issubclass", "callable", "hasattr", "id", "type", "repr", "str", "bool",
    "object", "super", "print", "len", "range", "zip", "enumerate", "map", "filter", "dict",
    "sorted", "max", "min",
    "sum", "any", "all", "abs", "round", "reversed", "iter", "property", "locals", "globals",
    "format", "ascii", "slice", "staticmethod",
}  # fmt: skip
_SAFE_WITHOUT_ARGUMENTS = {
    "list",
    "set",
    "tuple",
    "frozenset",
    "bytearray",
    "bytes",
    "int",
    "float",
}
_SAFE = {
    "threading": "Lock RLock Event Condition Semaphore BoundedSemaphore Barrier local Thread Timer "
    "current_thread get_ident main_thread",
    "_thread": "allocate_lock get_ident RLock",
    "multiprocessing": "current_process",
    "asyncio": "Lock Event Condition Queue Semaphore",
    "_io": "StringIO BytesIO",
    "collections": "deque OrderedDict defaultdict Counter ChainMap",
    "queue": "Queue SimpleQueue LifoQueue PriorityQueue",
    "weakref": "ref proxy WeakSet WeakValueDictionary WeakKeyDictionary WeakMethod finalize",
    "time": "time monotonic perf_counter time_ns monotonic_ns perf_counter_ns get_clock_info",
    "os": "getpid",
    "logging": "getLogger",
    "itertools": "count",
    "functools": "partial",
    "traceback": "extract_stack format_stack",
    "inspect": "isclass isfunction ismethod iscoroutinefunction isgeneratorfunction iscoroutine",
    "operator": "methodcaller attrgetter itemgetter",
    "uuid": "uuid4 uuid1",
    "contextlib": "ExitStack AsyncExitStack nullcontext closing suppress",
    "types": "SimpleNamespace MappingProxyType",
    "datetime": "datetime.now datetime.utcnow",
    "pathlib": "Path PurePath",
    "io": "StringIO BytesIO",
    "sys": "getrefcount exc_info is_finalizing _current_frames _getframe",
    "warnings": "warn",
    "atexit": "register",
    "typing": "cast",
    "dataclasses": "field",
}
# With constants, or nothing, as arguments.
_SAFE_WITH_CONSTANTS = {
    "concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.thread.ThreadPoolExecutor", "re.compile", "struct.Struct", "random.Random",
    "decimal.Decimal", "fractions.Fraction", "datetime.timedelta", "array.array",
}  # fmt: skip
_SAFE_DOTTED = {f"{module}.{name}" for module, names in _SAFE.items() for name in names.split()}
# Methods of strings, dictionaries, lists and loggers, by whatever name the object goes.
_SAFE_METHODS = {
    "items", "keys", "values", "copy", "append", "add", "setdefault", "lower", "upper", "strip",
    "lstrip", "rstrip", "startswith", "endswith", "format", "debug", "info", "warning", "error",
    "is_set",
    "acquire", "release", "replace", "split", "join", "encode", "title", "rsplit",
    "partition", "isdigit", "clear",
    "discard", "extend", "appendleft",
}  # fmt: skip
_LIKE_A_DICTIONARY = ("kwargs", "kwds", "kw", "options", "opts", "params", "config", "settings",
                      "environ", "headers", "args", "cfg", "conf", "attrs", "dict")  # fmt: skip
_NEVER_EMPTY = {"split", "rsplit", "partition", "rpartition", "splitext", "extract_stack",
                "exc_info", "stack"}  # fmt: skip
_PRIMITIVES = {"Lock", "RLock", "Event", "Condition", "Queue", "SimpleQueue", "LifoQueue", "deque"}
_DEEPEST = 3


class Risks:
    """Says what can raise; remembers it for the project's own functions."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[Function, bool] = {}

    def of(self, node: ast.AST, env: Env) -> Iterator[ast.AST]:
        """Yield what can raise in an expression, or in a simple statement, in its order."""
        skipped: set[int] = set()
        for one in children([node]):
            if isinstance(one, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(one, ast.AnnAssign):
                skipped |= {id(below) for below in ast.walk(one.annotation)}
            if id(one) not in skipped and self.is_risky(one, env):
                yield one

    def is_risky(self, node: ast.AST, env: Env, depth: int = 0) -> bool:
        """Whether a node by itself can raise, its parts aside."""
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Await)):
            return True
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load) and _item_may_be_missing(node, env)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            return _is_number(node.left) and not isinstance(node.right, ast.Constant)
        if isinstance(node, ast.Assign):
            unpacks = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
            return unpacks and not isinstance(node.value, (ast.Tuple, ast.List, ast.Call))
        return isinstance(node, ast.Call) and self._call_is_risky(node, env, depth)

    def _call_is_risky(self, node: ast.Call, env: Env, depth: int) -> bool:
        name, func = last_name(node.func), node.func
        if isinstance(func, ast.Attribute):
            is_text = isinstance(func.value, (ast.Constant, ast.JoinedStr))
            if is_text or name in _SAFE_METHODS:
                return False
        if isinstance(func, ast.Attribute) and name in {"get", "pop"}:
            # Where there is no default, such code has looked before.
            return not last_name(func.value).endswith(_LIKE_A_DICTIONARY)
        if name == "getattr" and len(node.args) == 3:
            return False
        if name == "__init__" and isinstance(func, ast.Attribute):
            found = self._evaluator.evaluate(func, env)
            if not found:  # A class from elsewhere: what it makes of arguments is not known.
                given = bool(node.args or node.keywords)
                return given and not self._bases_are_safe(env.scope)
        values = self._evaluator.evaluate(func, env)
        if not values and (name == "partial" or (name in _PRIMITIVES and not node.args)):
            return False
        return not values or any(self._is_risky_value(value, node, depth) for value in values)

    def _is_risky_value(self, value: object, node: ast.Call, depth: int) -> bool:
        if isinstance(value, External):
            module, _, name = value.dotted.rpartition(".")
            given = (*node.args, *(keyword.value for keyword in node.keywords))
            if module == "builtins":
                # What is written in capitals is a constant.
                few = name in _SAFE_WITHOUT_ARGUMENTS and all(last_name(a).isupper() for a in given)
                made_only = name.endswith(("Error", "Exception", "Warning"))
                return not (few or made_only or name in _SAFE_BUILTINS)
            plain = all(isinstance(one, ast.Constant) for one in given)
            return value.dotted not in _SAFE_DOTTED and not (
                plain and value.dotted in _SAFE_WITH_CONSTANTS
            )
        if isinstance(value, Class):
            return self._construction_is_risky(value, depth)
        if isinstance(value, Bound):
            return self.function_is_risky(value.function, value.receiver, depth)
        if isinstance(value, Function):
            return self.function_is_risky(value, None, depth)
        return True

    def _bases_are_safe(self, scope: object) -> bool:
        """Whether a method's class has no bases from elsewhere but those that cannot fail."""
        owner = scope.owner if isinstance(scope, Function) else None
        if owner is None:
            return False
        values = [
            value
            for base in owner.node.bases
            for value in self._evaluator.evaluate(base, Env(owner.scope))
        ]
        return bool(values) and all(
            isinstance(one, External) and one.dotted in _SAFE_DOTTED for one in values
        )

    def _construction_is_risky(self, cls: Class, depth: int) -> bool:
        _, complete = self._evaluator.linear(cls)
        made = Instance(cls)
        for name in ("__new__", "__init__", "__post_init__"):
            found = self._evaluator.member(cls, name)
            if found and isinstance(found[1], Function):
                if self.function_is_risky(found[1], made, depth):
                    return True
                complete = complete or name == "__init__"
        return not complete

    def function_is_risky(
        self, function: Function, receiver: Instance | Class | None, depth: int = 0
    ) -> bool:
        """Whether a call of one of the project's functions can raise."""
        if function in self._known:
            return self._known[function]
        if depth > _DEEPEST or isinstance(function.node, ast.AsyncFunctionDef):
            return not isinstance(function.node, ast.AsyncFunctionDef)
        self._known[function] = False  # What calls itself raises only where something else does.
        env = Env(function, receiver)
        handled = _handled(function)
        risky = any(
            self.is_risky(one, env, depth + 1)
            for one in children(function.body)
            if not isinstance(one, (ast.Lambda, ast.FunctionDef, ast.ClassDef))
            and id(one) not in handled
            and not _is_abstract(one)
        )
        self._known[function] = risky
        return risky


def _handled(function: Function) -> set[int]:
    """Return the nodes, by id, whose usual error is caught where they stand."""
    return {
        id(inner)
        for one in children(function.body)
        if isinstance(one, ast.Try)
        for inner in children(one.body)
        if is_expected(inner, one.handlers)
    }


def _is_abstract(node: ast.AST) -> bool:
    """Whether it says that a subclass has to define this, of which nothing else is known."""
    if not isinstance(node, ast.Raise):
        return False
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return raised is not None and last_name(raised) == "NotImplementedError"


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


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
