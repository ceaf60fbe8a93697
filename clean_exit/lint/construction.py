"""What ``__init__`` sets and what may fail before it, in the order of the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from clean_exit.lint.evaluator import Bound, Env, Evaluator, Instance, Value, dotted
from clean_exit.lint.facts import Facts, states_of
from clean_exit.lint.handlers import handles
from clean_exit.lint.scopes import (
    Class,
    Function,
    assignments_in,
    decorator_names,
    inside,
    last_name,
    mangle,
)

_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}
# Calls that fail in ordinary use: a file, a program, a library or a network may be missing.
_LIKELY = re.compile(
    r"(.*\.)?(open|fdopen|connect|create_connection|bind|listen|Popen|check_call|check_output|dlopen"
    r"|mkdir|makedirs|mkdtemp|mkstemp|NamedTemporaryFile|TemporaryFile|TemporaryDirectory|urlopen"
    r"|ZipFile|TarFile|CDLL|WinDLL|LoadLibrary|mmap|memmap|SharedMemory|import_module|__import__"
    r"|load|loads|load_library|get_distribution|getaddrinfo|listdir|stat|unlink|remove|rename"
    r"|read|recv|send|sendall|login|urlretrieve|fromfile|from_file|from_pretrained|tcgetattr)"
)
# These load and read from memory, or are methods of dictionaries and lists.
_UNLIKELY = re.compile(r"(os\.environ|builtins\.(dict|list|set|str))\..*|.*\.(path|stat)\.\w+")
_MAX_DEPTH = 3  # functions of the project from __init__ to the call that may fail


class Step(NamedTuple):
    """One thing that a construction does: it sets an attribute, or makes a call that may fail."""

    name: str  # the attribute; "" if this may fail
    node: ast.AST | None
    where: Function
    states: tuple[str, ...] = ()


@dataclass
class Construction:
    """What the construction of an object does, in the order of the source.

    Branches and loops count as if all of them ran. That loses findings, but a finding names a call
    that comes before the attribute in the source.

    Attributes:
        cls: The class.
        defaults: The attributes of the class, which always exist, with the states of their values.
        setters: For each attribute, the methods that set it.
        is_known: Whether all code that sets attributes is known.
        steps: The steps.
    """

    cls: Class
    defaults: dict[str, tuple[str, ...]] = field(default_factory=dict)
    setters: dict[str, list[str]] = field(default_factory=dict)
    is_known: bool = True
    steps: list[Step] = field(default_factory=list)

    def why_missing(self, name: str, facts: Facts) -> Step | str | None:
        """Return the step that may fail before an attribute is set.

        Args:
            name: The attribute.
            facts: What is known where the destructor uses it.

        Returns:
            The step; the name of a method if ``__init__`` does not set the attribute; else None.
        """
        if not self.is_known or name in self.defaults or name not in self.setters:
            return None
        names = [step.name for step in self.steps]
        if name not in names:
            return self.setters[name][0] if self._is_possible(len(names), facts) else None
        for at, step in enumerate(self.steps[: names.index(name)]):
            if not step.name and self._is_possible(at, facts):
                return step
        return None

    def _is_possible(self, end: int, facts: Facts) -> bool:
        """Whether the tests of the destructor hold for an object that was built up to a step."""
        states = dict(self.defaults)
        for step in self.steps[:end]:
            if step.name:
                states[step.name] = step.states
        tested = {name for name, _ in facts.at_start if name in self.setters}
        return all(name in states for name in tested) and not any(
            (name, state) in facts.at_start
            for name in tested
            for known in states[name]
            for state in _EXCLUDED[known]
        )


_EXCLUDED = {"none": ("true", "full"), "false": ("true",), "true": ("false", "none"), "full": ()}


class Constructions:
    """Reads the construction of each class once."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[Class, Construction] = {}
        self._may_fail: dict[tuple[Function, int], bool] = {}

    def of(self, cls: Class) -> Construction:
        """Return what the construction of an object does."""
        if cls not in self._known:
            built = self._known[cls] = Construction(cls)
            self._read_classes(built)
            init = self._evaluator.method(cls, "__init__")
            init = init or self._evaluator.method(cls, "__post_init__")
            for method in (self._evaluator.method(cls, "__new__"), init):
                if method:
                    built.steps += self._steps(built, method, ())
        return self._known[cls]

    def _read_classes(self, built: Construction) -> None:
        """Note the defaults and the methods that set attributes, in a class and its bases."""
        order, _ = self._evaluator.mro(built.cls)
        for cls in reversed(order):
            for name, value in cls.members.items():
                if not _is_set_later(value):
                    built.defaults[mangle(name, cls)] = tuple(states_of(value))
            for name in cls.annotations if _FIELDS & set(decorator_names(cls.node)) else ():
                if not _is_set_later(cls.members.get(name)):
                    built.defaults[name] = ()
            for name, set_by in self._evaluator.assignments(cls).items():
                methods = [function for function, _ in set_by]
                built.setters.setdefault(name, []).extend(one.name for one in methods)
                if any(one.is_of_class for one in methods):
                    built.defaults[name] = ()  # A class method sets it on the class.
            is_read = all(self._is_read(cls, base) for base in cls.node.bases)
            is_dynamic = {"__getattr__", "__getattribute__"} & set(cls.members)
            is_dynamic |= {one.name for one in cls.methods if _sets_unknown_names(one)}
            built.is_known = built.is_known and is_read and not is_dynamic

    def _is_read(self, cls: Class, base: ast.expr) -> bool:
        """Whether the attributes that a base sets are known: it was read, or is Python's own."""
        base = base.value if isinstance(base, ast.Subscript) else base
        value = self._evaluator.evaluate(base, Env(cls.outer or cls.scope))
        package = dotted(value).partition(".")[0]
        return isinstance(value, Class) or package in sys.stdlib_module_names

    def _steps(
        self, built: Construction, function: Function, above: tuple[Function, ...]
    ) -> Iterator[Step]:
        """Yield the steps of a method of the object."""
        env = Env(function, Instance(built.cls, is_self=True))
        new = function.name == "__new__"
        for node in _in_order(function.node):
            for one in assignments_in(node, function):
                yield Step(one.name, node, function, tuple(states_of(one.value)))
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                yield Step(mangle(node.target.attr, function.owner), node, function)
            if new and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                name, states = mangle(node.targets[0].attr, built.cls), states_of(node.value)
                yield Step(name, node, function, tuple(states))
            if isinstance(node, ast.Call):
                value = self._evaluator.evaluate(node.func, env)
                own = value.function if isinstance(value, Bound) else value
                callers = (*above, function)
                if isinstance(own, Function) and _is_method_of_object(own, value, node, callers):
                    yield from self._steps(built, own, callers)
                    continue
                if self._call_may_fail(value, node, 0):
                    yield Step("", node, function)
            elif _may_raise(node):
                yield Step("", node, function)

    def _call_may_fail(self, value: Value | None, node: ast.Call, depth: int) -> bool:
        if isinstance(value, Class):
            found = (self._evaluator.method(value, name) for name in ("__init__", "__post_init__"))
            return any(one and self._function_may_fail(one, depth) for one in found)
        function = value.function if isinstance(value, Bound) else value
        if isinstance(function, Function):
            return self._function_may_fail(function, depth)
        name = dotted(value) or ast.unparse(node.func)
        return bool(_LIKELY.fullmatch(name)) and not _UNLIKELY.fullmatch(name)

    def _function_may_fail(self, function: Function, depth: int) -> bool:
        """Whether a function of the project raises, or makes a call that may fail."""
        if function.is_async or depth > _MAX_DEPTH:
            return False
        if (function, depth) not in self._may_fail:
            env = Env(function)
            self._may_fail[function, depth] = any(
                self._call_may_fail(self._evaluator.evaluate(node.func, env), node, depth + 1)
                if isinstance(node, ast.Call)
                else _may_raise(node)
                for node in _in_order(function.node)
            )
        return self._may_fail[function, depth]


def _in_order(top: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function in the order of evaluation, without what a handler catches.

    Handlers are left out as well, except for what they set: a second failure is too rare.
    """
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

    def visit(node: ast.AST, handlers: list[ast.ExceptHandler]) -> Iterator[ast.AST]:
        if isinstance(node, scopes):
            return
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
            # Another way out; only its test is on the way.
            node = ast.Module([ast.Expr(node.test), *node.orelse], [])
        if isinstance(node, ast.Try):
            for one in node.finalbody:  # What it sets is set in any case.
                yield from visit(one, handlers)
            # A handler that raises does so because the body did not set what it should.
            for handler in node.handlers:
                kinds = (ast.Assign, ast.AnnAssign, ast.Raise)
                yield from (part for part in inside(handler) if isinstance(part, kinds))
            for one in node.body:
                yield from visit(one, [*node.handlers, *handlers])
            for one in node.orelse:
                yield from visit(one, handlers)
            return
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            parts = [node.value]  # It is evaluated before the attribute is set.
        for child in parts:
            yield from visit(child, handlers)
        if not (handlers and handles(handlers, node)):
            yield node

    body = getattr(top, "body", [])
    for statement in body if isinstance(body, list) else [body]:
        yield from visit(statement, [])


def _is_method_of_object(
    own: Function, value: Value | None, node: ast.Call, callers: tuple[Function, ...]
) -> bool:
    """Whether a call runs another method of the object that is built."""
    if own.owner is None or own.is_async or own in callers or len(callers) > _MAX_DEPTH:
        return False
    if isinstance(value, Bound):
        return isinstance(value.receiver, Instance) and value.receiver.is_self
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Name) and first.id == callers[-1].self_name


def _is_set_later(value: object) -> bool:
    """Whether a value in a class body is a dataclass field that ``__init__`` does not set."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    init = options.get("init")
    is_off = isinstance(init, ast.Constant) and init.value is False
    return is_off and options.keys().isdisjoint({"default", "default_factory", "factory"})


def _may_raise(node: ast.AST) -> bool:
    """Whether a node raises by itself, apart from abstract methods."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return last_name(raised) not in {"NotImplementedError", "StopIteration"}
    if isinstance(node, ast.ImportFrom):
        return not node.level and _is_foreign(node.module or "")
    return isinstance(node, ast.Import) and any(_is_foreign(alias.name) for alias in node.names)


def _is_foreign(module: str) -> bool:
    """Whether a module may not be installed."""
    return module.partition(".")[0] not in sys.stdlib_module_names


def _sets_unknown_names(function: Function) -> bool:
    """Whether a method sets attributes whose names are not in the source."""
    for node in inside(function.node):
        if isinstance(node, ast.Call):
            if last_name(node.func) == "update" and "__dict__" in ast.dump(node.func):
                return True
            if last_name(node.func) == "setattr" and not assignments_in(node, function):
                return True
    return False
