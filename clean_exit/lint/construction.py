"""The ways in which the construction of an object can end, and what can raise on the way."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from clean_exit.lint.evaluator import Bound, Env, Evaluator, External, Instance, Value, dotted
from clean_exit.lint.facts import Facts, states_of
from clean_exit.lint.handlers import handles
from clean_exit.lint.scopes import (
    Class,
    Function,
    assignments_in,
    children,
    decorator_names,
    inside,
    last_name,
    mangle,
)

_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}


@dataclass(frozen=True)
class Exit:
    """A way in which a construction ends: normally, or because `cause` raised in `where`."""

    facts: Facts
    cause: ast.AST | None = None
    where: Function | None = None


@dataclass
class Construction:
    """All ways in which the construction of an object can end.

    Attributes:
        begin: What holds before ``__init__``.
        defaults: The attributes of the class, which always exist.
        assigned: The attributes that methods of the class set.
        is_known: Whether all code that sets attributes is known.
        exits: The ways; `Walker` adds them.
    """

    cls: Class
    begin: Facts
    defaults: set[str]
    assigned: set[str]
    is_known: bool
    exits: list[Exit] = field(default_factory=list)

    def missing(self, name: str, facts: Facts, *, tested: bool) -> Exit | None:
        """Return a way that ends without an attribute; None if every way sets it.

        Args:
            name: The attribute.
            facts: What is known where the destructor uses it.
            tested: Whether attributes were tested before. Then an attribute that is set under a
                condition counts as set: the test may be the same condition.
        """
        set_at = next((at for at, one in enumerate(self.exits) if name in one.facts.possibly_set),
                      len(self.exits))  # fmt: skip
        states = [(one, state) for one, state in facts.at_start if one in self.assigned]
        was_set = {one for one, state in states if state in ("true", "full")
                   or (state == "there" and one not in self.defaults)}  # fmt: skip
        ways = [
            one
            for at, one in enumerate(self.exits)
            if not one.facts.has(name)
            and not (tested and (one.cause is None or at >= set_at))
            and was_set <= one.facts.possibly_set
            and not any(one.facts.excludes(*each) for each in states)
        ]
        # A failure in the class's own __init__ is a better example than one in a base class.
        own = [one for one in ways if one.where and one.where.owner is self.cls]
        return next(iter(own or ways), None)


def begin_construction(evaluator: Evaluator, cls: Class) -> Construction:
    """Return what is known about the objects of a class before ``__init__``."""
    order, _ = evaluator.mro(cls)
    begin, defaults, assigned = Facts(), set(), set()
    for one in reversed(order):
        for name, value in one.members.items():
            if not _is_field(value):
                defaults.add(mangle(name, one))
                begin = begin.storing(mangle(name, one), *states_of(value))
        for name in one.annotations if _FIELDS & set(decorator_names(one.node)) else ():
            if not _is_not_init(one.members.get(name)):
                begin = begin.storing(name)
        for name, set_by in evaluator.assignments(one).items():
            assigned.add(name)
            if any(function.is_of_class for function, _ in set_by):
                defaults.add(name)  # A class method sets it on the class.
        new = one.members.get("__new__")
        for node in inside(new.node) if isinstance(new, Function) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                begin = begin.storing(mangle(node.attr, one))
    is_known = all(_is_known(evaluator, one, base) for one in order for base in one.node.bases)
    return Construction(cls, begin, defaults, assigned | begin.possibly_set, is_known)


def _is_known(evaluator: Evaluator, cls: Class, base: ast.expr) -> bool:
    """Whether the attributes that a base sets are known: it was read, or is Python's own."""
    base = base.value if isinstance(base, ast.Subscript) else base
    value = evaluator.evaluate(base, Env(cls.outer or cls.scope))
    package = dotted(value).partition(".")[0]
    return isinstance(value, Class) or package in sys.stdlib_module_names


def is_dynamic(node: ast.Call, function: Function) -> bool:
    """Whether a call sets attributes whose names are not in the source."""
    if last_name(node.func) == "update" and "__dict__" in ast.dump(node.func):
        return True
    return last_name(node.func) == "setattr" and not assignments_in(node, function)


def _is_field(value: object) -> bool:
    """Whether a value in a class body is a dataclass field without a default on the class."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    return not any(keyword.arg == "default" for keyword in value.keywords)


def _is_not_init(value: object) -> bool:
    """Whether a dataclass field is one that the generated ``__init__`` does not set."""
    if not isinstance(value, ast.Call) or not _is_field(value):
        return False
    options = {k.arg: k.value for k in value.keywords}
    off = options.get("init")
    never = isinstance(off, ast.Constant) and off.value is False
    return never and "default_factory" not in options and "factory" not in options


# Functions and classes of Python and its library that do not raise in ordinary use.
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
# The same, if all arguments are constants.
_SAFE_WITH_CONSTANTS = {
    "list", "set", "tuple", "frozenset", "bytearray", "bytes", "int", "float", "ThreadPoolExecutor",
    "ProcessPoolExecutor", "compile", "Struct", "Random", "Decimal", "Fraction", "timedelta",
    "array",
}  # fmt: skip
# Methods of strings, dictionaries, lists and loggers.
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
_MAX_DEPTH = 3  # Calls in a row; a function further away counts as one that can raise.


class Risks:
    """Finds the nodes that can raise, and caches the answer for functions of the project."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[tuple[Function, int], bool] = {}
        self._stack: list[Function] = []

    def within(self, node: ast.AST, env: Env, depth: int = 0) -> Iterator[ast.AST]:
        """Yield the nodes that can raise in an expression or a simple statement, in order."""
        annotation = getattr(node, "annotation", None)
        skipped = set(ast.walk(annotation)) if annotation else set()
        for one in children([node]):
            if one not in skipped and self._is_risky(one, env, depth):
                yield one

    def _is_risky(self, node: ast.AST, env: Env, depth: int) -> bool:
        """Whether a node can raise, apart from its parts."""
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Await,
                             ast.Yield, ast.YieldFrom)):  # fmt: skip
            return True
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load) and _item_may_be_missing(node, env)
        if isinstance(node, ast.Assign):
            unpacks = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
            return unpacks and not isinstance(node.value, (ast.Tuple, ast.List, ast.Call))
        return isinstance(node, ast.Call) and self._call_is_risky(node, env, depth)

    def _call_is_risky(self, node: ast.Call, env: Env, depth: int) -> bool:
        name, func = last_name(node.func), node.func
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(func, ast.Attribute):
            if name in _SAFE_METHODS or isinstance(func.value, (ast.Constant, ast.JoinedStr)):
                return False
            if name in {"get", "pop"}:  # Code that omits the default has usually checked before.
                return not last_name(func.value).endswith(_LIKE_A_DICTIONARY)
        if name == "getattr" and len(node.args) == 3:
            return False
        value = self._evaluator.evaluate(func, env)
        if value is None and name in {"__init__", "__setattr__"}:
            return False  # An unknown base: which attributes it sets is not known either.
        if value is None:
            return name not in _SAFE_UNKNOWN or bool(arguments and name != "partial")
        return self._value_is_risky(value, arguments, depth)

    def _value_is_risky(self, value: Value, arguments: list[ast.expr], depth: int) -> bool:
        if isinstance(value, External):
            package, name = value.dotted.partition(".")[0], value.dotted.rpartition(".")[2]
            if package not in sys.stdlib_module_names or package == "multiprocessing":
                return True
            # A name in capitals is a constant.
            plain = all(isinstance(a, ast.Constant) or last_name(a).isupper() for a in arguments)
            is_error = name.endswith(("Error", "Exception", "Warning"))
            return not (is_error or name in _SAFE or (plain and name in _SAFE_WITH_CONSTANTS))
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
        return risky or not (found["__init__"] or self._evaluator.mro(cls)[1])

    def _function_is_risky(
        self, function: Function, receiver: Instance | Class | None, depth: int
    ) -> bool:
        """Whether a call of one of the project's functions can raise."""
        if function.is_async or function in self._stack:
            return False  # In a recursion, another node raises first.
        key = (function, depth)
        if depth <= _MAX_DEPTH and key not in self._known:
            self._stack.append(function)
            env = Env(function, receiver)
            handled = {
                inner
                for one in inside(function.node)
                if isinstance(one, ast.Try)
                for inner in children(one.body)
                if handles(one.handlers, inner)
            }
            risky = any(
                one not in handled and not _is_abstract(one)
                for statement in function.body
                for one in self.within(statement, env, depth + 1)
            )
            self._stack.pop()
            self._known[key] = risky
        return self._known.get(key, True)


def _is_abstract(node: ast.AST) -> bool:
    """Whether a node raises NotImplementedError, so that a subclass defines the method."""
    raised = node.exc if isinstance(node, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return last_name(raised) == "NotImplementedError"


def _item_may_be_missing(node: ast.Subscript, env: Env) -> bool:
    """Whether a constant index reads an item that the function has not stored."""
    if not isinstance(node.slice, ast.Constant):
        return False
    if isinstance(node.value, ast.Call) and last_name(node.value.func) in _NEVER_EMPTY:
        return node.slice.value != 0
    item = ast.dump(node.value), node.slice.value
    return not any(
        isinstance(one, ast.Subscript)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.slice, ast.Constant)
        and (ast.dump(one.value), one.slice.value) == item
        for one in inside(env.scope.node if isinstance(env.scope, Function) else node)
    )
