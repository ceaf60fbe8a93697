"""The functions that a destructor reaches: their variables, and what their tests show."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Union

from clean_exit.lint.construction import Construction
from clean_exit.lint.evaluator import (
    Bound,
    Env,
    Evaluator,
    Instance,
    Named,
    Value,
    Variables,
    dotted,
)
from clean_exit.lint.facts import ALIVE, NOTHING, Facts, facts_about
from clean_exit.lint.findings import Step
from clean_exit.lint.scopes import Class, Function, bind_arguments, last_name, mangle

# The usual names of functions and attributes that tell whether the interpreter is shutting down.
SHUTDOWN_CHECK = re.compile(
    r"_*(is_|interpreter_|python_)*(finalizing|shutting_?down|exiting|shutdown_started)"
    r"|_*(is_)?(interpreter_shutdown|python_exit_status)"
)


@dataclass(eq=False)
class Frame:
    """A function during the walk: how it was reached, and what is known at the current node.

    Attributes:
        receiver: The object of the method, or its class.
        construction: What the construction of the destroyed object does.
        destroyed: The class of the destroyed object.
        trace: The functions from the destructor to this one.
        facts: What is known at the current node.
        variables: The values of variables in this function and those around it.
        constants: The parameters with a known value, such as ``blocking=False``.
        aliases: The attribute of the object that each variable was read from.
        tests: The test that each variable holds the result of.
        conditions: The tests around the current statement.
        ends: What is known at each return.
        own_names: The variables of the comprehensions around the current node.
    """

    evaluator: Evaluator
    function: Function
    receiver: Instance | Class | None
    construction: Construction
    destroyed: Class
    trace: tuple[Step, ...]
    facts: Facts
    variables: Variables = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tests: dict[str, ast.expr] = field(default_factory=dict)
    conditions: list[ast.expr] = field(default_factory=list)
    ends: list[Facts] = field(default_factory=list)
    own_names: set[str] = field(default_factory=set)

    def calling(
        self, function: Function, receiver: Instance | Class | None, **changes: object
    ) -> Frame:
        """Return the frame of a function that this function calls."""
        fresh: dict[str, object] = {"aliases": {}, "tests": {}, "conditions": [], "ends": [],
                                    "own_names": set(), **changes}  # fmt: skip
        return replace(self, function=function, receiver=receiver, **fresh)  # type: ignore[arg-type]

    @property
    def env(self) -> Env:
        """The environment of the function's expressions."""
        return Env(self.function, self.receiver, 0, self.variables)

    @property
    def is_destructor(self) -> bool:
        """Whether this is the destructor itself."""
        return len(self.trace) == 1

    @property
    def self_name(self) -> str | None:
        """The name of the parameter for the object."""
        return self.function.self_name

    @property
    def object(self) -> Instance:
        """The object that is destroyed."""
        return Instance(self.destroyed, is_self=True)

    def checks_arguments(self) -> bool:
        """Whether the current node depends on a test of arguments, which the caller chooses."""
        own = set(self.function.all_parameters) - {self.self_name, *self.aliases}
        names = {
            n.id for test in self.conditions for n in ast.walk(test) if isinstance(n, ast.Name)
        }
        return not self.is_destructor and not own.isdisjoint(names)

    def evaluate(self, node: ast.AST) -> Value | None:
        """Return the value of an expression of the function, if it is known."""
        return self.evaluator.evaluate(node, self.env)

    def named(self, name: str) -> Named:
        """Return the bindings of a name."""
        if name in self.own_names:
            return Named("local", self.function)
        return self.evaluator.named(self.function, name)

    def is_object(self, node: ast.AST) -> bool:
        """Whether an expression is the object that is destroyed."""
        return isinstance(node, ast.Name) and self.evaluate(node) == self.object

    def mangled(self, name: str) -> str:
        """Return a private attribute's name as Python stores it."""
        function: Function | None = self.function
        while function and not function.owner:
            function = function.parent
        return mangle(name, function.owner if function else None)

    def own_attribute(self, node: ast.AST) -> str | None:
        """Return the attribute of the destroyed object that an expression reads or checks."""
        if isinstance(node, ast.Attribute):
            return self.mangled(node.attr) if self.is_object(node.value) else None
        if not isinstance(node, ast.Call) or not node.args:
            return None
        name, holder, key = last_name(node.func), node.args[0], node.args[-1]
        if name in {"getattr", "hasattr"} and len(node.args) > 1:
            key = node.args[1]
        elif name == "get" and isinstance(node.func, ast.Attribute):
            holder, key = node.func.value, node.args[0]
            if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
                holder = holder.value
        else:
            return None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and self.is_object(holder):
            return key.value
        return None

    def attribute_behind(self, node: ast.expr) -> str | None:
        """Return the attribute that an expression, or a variable, was read from."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        return self.own_attribute(node)

    def state_name(self, node: ast.expr) -> str | None:
        """Return the name in facts of an attribute, a parameter or a call without arguments."""
        if name := self.attribute_behind(node):
            return name
        if isinstance(node, ast.Name) and node.id in self.function.all_parameters:
            return f"({node.id})"
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        name = self.own_attribute(node.func)
        return f"{name}()" if name else None

    def test_behind(self, node: ast.expr) -> tuple[Frame, ast.expr] | None:
        """Return the test that a variable, property or short function stands for, and its frame."""
        if isinstance(node, ast.Name):
            return (self, self.tests[node.id]) if node.id in self.tests else None
        function = self._tested_function(node)
        if function is None or function.is_async or (test := _only_return(function)) is None:
            return None
        if set(function.all_parameters) - {function.self_name} - set(function.defaults):
            return None
        receiver = self.object if function.owner else None
        constants = constants_of(bind_arguments(function, None, bound=True))
        return self.calling(function, receiver, constants=constants), test

    def _tested_function(self, node: ast.expr) -> Function | None:
        """Return the property, method or function that a test evaluates."""
        if isinstance(node, ast.Attribute) and self.is_object(node.value):
            method = self.evaluator.method(self.destroyed, self.mangled(node.attr))
            return method if method and method.is_property else None
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        value = self.evaluate(node.func)
        if isinstance(value, Bound) and value.receiver == self.object:
            return value.function
        return value if isinstance(value, Function) and value.owner is None else None

    def checks_shutdown(self, node: ast.Call) -> bool:
        """Whether a call tells if the interpreter is shutting down."""
        value = self.evaluate(node.func)
        if SHUTDOWN_CHECK.fullmatch(last_name(node.func)) or dotted(value) == "sys.is_finalizing":
            return True
        test = _only_return(value) if isinstance(value, Function) else None
        text = ast.unparse(test) if test else ""
        return "is_finalizing()" in text and " not " not in f" {text} "


def constants_of(arguments: Mapping[str, ast.expr]) -> dict[str, object]:
    """Return the parameters with a constant argument, and its value."""
    return {name: one.value for name, one in arguments.items() if isinstance(one, ast.Constant)}


def _only_return(function: Function) -> ast.expr | None:
    """Return the returned expression of a function that does nothing else."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    only = body[0] if len(body) == 1 else None
    return only.value if isinstance(only, ast.Return) else None


_MAX_TEST_DEPTH = 40  # Nested tests.
_INDIRECTION = 15  # The depth that a test in a variable or a function adds.
_META_PATH = re.compile(r"getattr\(_?sys, 'meta_path', None\)")
_Branch = Union[Facts, None]  # noqa: UP007
_Branches = tuple[_Branch, _Branch]


def branches(frame: Frame, node: ast.expr, depth: int = 0) -> _Branches:
    """Return what holds if a test is true and if it is false; None for an impossible branch."""
    if depth > _MAX_TEST_DEPTH:
        return NOTHING, NOTHING
    node = plain_test(node)
    true, false = _branches(frame, node, depth)
    behind = frame.test_behind(node)
    if behind is None:
        return true, false
    more = branches(*behind, depth + _INDIRECTION)
    return _both(true, more[0]), _both(false, more[1])


def _both(first: _Branch, second: _Branch) -> _Branch:
    return None if first is None or second is None else first.plus(second)


def _either(first: _Branch, second: _Branch) -> _Branch:
    """Return what holds on either of two ways; None if neither is possible."""
    return first.common(second) if first and second else first or second


def _branches(frame: Frame, node: ast.expr, depth: int) -> _Branches:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return branches(frame, node.operand, depth + 1)[::-1]
    if isinstance(node, ast.BoolOp):
        # "or" does for false what "and" does for true.
        step = 1 if isinstance(node.op, ast.And) else -1
        parts = [branches(frame, one, depth + 1)[::step] for one in node.values]
        joined = (
            reduce(_both, (all_of for all_of, _ in parts)),
            reduce(_either, (one_of for _, one_of in parts)),
        )
        return joined[::step]  # type: ignore[return-value]
    if isinstance(node, ast.NamedExpr):
        return branches(frame, node.value, depth + 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(frame, node)
    if isinstance(node, ast.Constant):
        return _decided(bool(node.value))
    if isinstance(node, ast.Name) and node.id in frame.constants:
        return _decided(bool(frame.constants[node.id]))
    if isinstance(node, ast.Call):
        return _call(frame, node)
    return _both(_state(frame, node, "true"), _not_none(frame, node)), _state(frame, node, "false")


def _decided(truth: bool) -> _Branches:
    return (NOTHING, None) if truth else (None, NOTHING)


def _state(frame: Frame, node: ast.expr, what: str) -> _Branch:
    """Return what a test shows about an attribute; None if its state is known to be another."""
    name = frame.state_name(node)
    return None if name and frame.facts.excludes(name, what) else facts_about(name, what)


def _not_none(frame: Frame, node: ast.expr) -> Facts:
    """Return what holds if an expression has a value other than None."""
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Name) and frame.named(node.id).kind == "global":
        return Facts(present=frozenset({node.id}))
    return facts_about(frame.attribute_behind(node), "there")


def _compare(frame: Frame, node: ast.Compare) -> _Branches:
    left, right, how = node.left, node.comparators[0], node.ops[0]
    if isinstance(how, (ast.In, ast.NotIn)):
        facts = _contained(frame, left, right)
        return (facts, NOTHING) if isinstance(how, ast.In) else (NOTHING, facts)
    same = isinstance(how, (ast.Is, ast.Eq))
    if isinstance(left, ast.Constant) and left.value is None:
        left, right = right, left
    there = _not_none(frame, left)
    if not isinstance(right, ast.Constant) or not isinstance(
        how, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
    ):  # None has no order, so a comparison by size shows another value.
        is_positive = isinstance(how, ast.Gt) and isinstance(right, ast.Constant)
        if is_positive and right.value == 0:  # type: ignore[attr-defined]
            return _both(there, _state(frame, left, "true")), NOTHING
        return there, there
    if right.value is None and is_meta_path(left):
        return (NOTHING, ALIVE) if same else (ALIVE, NOTHING)
    if isinstance(left, ast.Name) and left.id in frame.constants:
        return _decided((frame.constants[left.id] == right.value) == same)
    equal: _Branch
    other: _Branch
    if right.value is None:
        equal, other = _state(frame, left, "none"), _both(there, _state(frame, left, "full"))
    elif right.value:
        equal, other = _both(there, _state(frame, left, "true")), NOTHING
    else:
        equal, other = _state(frame, left, "false"), _both(there, _state(frame, left, "true"))
    return (equal, other) if same else (other, equal)


def _contained(frame: Frame, left: ast.expr, right: ast.expr) -> Facts:
    """Return what ``"name" in self.__dict__``, ``vars(self)`` or ``dir(self)`` shows."""
    if isinstance(left, ast.Constant) and isinstance(left.value, str):
        me = frame.self_name
        if ast.unparse(right) in {f"{me}.__dict__", f"vars({me})", f"dir({me})"}:
            return facts_about(left.value, "there")
    return NOTHING


def _call(frame: Frame, node: ast.Call) -> _Branches:
    if frame.checks_shutdown(node):
        return NOTHING, ALIVE
    name = last_name(node.func)
    if name in {"callable", "isinstance"} and node.args:
        return _not_none(frame, node.args[0]), NOTHING
    attribute = frame.own_attribute(node)
    if name == "hasattr" and not attribute:
        return NOTHING, None  # What another object gets at its first use is there by now.
    if name == "hasattr" and attribute:
        return facts_about(attribute, "there"), None if frame.facts.has(attribute) else NOTHING
    true, false = _state(frame, node, "true"), _state(frame, node, "false")
    if name in {"getattr", "get"} and attribute:
        default = node.args[2 if name == "getattr" else 1 :][:1]
        there = facts_about(attribute, "there")
        if default and isinstance(default[0], ast.Constant) and default[0].value:
            return NOTHING, _both(there, false)  # Where it is missing, this is true.
        return _both(there, true), false
    return true, false


def plain_test(node: ast.expr) -> ast.expr:
    """Return ``all((a, b))``, ``any(...)`` and ``None in (a, b)`` as an ``and`` or ``or``."""
    if isinstance(node, ast.Call) and last_name(node.func) in {"all", "any"} and node.args:
        parts, op = node.args[0], ast.And() if last_name(node.func) == "all" else ast.Or()
        if isinstance(parts, (ast.Tuple, ast.List)) and len(parts.elts) > 1:
            return ast.copy_location(ast.BoolOp(op, parts.elts), node)
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], (ast.Tuple, ast.List)):
        left, how, parts = node.left, node.ops[0], node.comparators[0]
        is_none = isinstance(left, ast.Constant) and left.value is None
        if is_none and isinstance(how, (ast.In, ast.NotIn)) and len(parts.elts) > 1:
            same = isinstance(how, ast.In)
            test = ast.Is() if same else ast.IsNot()
            each: list[ast.expr] = [
                ast.copy_location(ast.Compare(one, [test], [left]), one) for one in parts.elts
            ]
            return ast.copy_location(ast.BoolOp(ast.Or() if same else ast.And(), each), node)
    return node


def is_none_test(node: ast.expr) -> bool:
    """Whether a test compares a value with None, which a name that is None survives."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, *node.comparators)
    return any(isinstance(one, ast.Constant) and one.value is None for one in sides)


def is_meta_path(node: ast.expr) -> bool:
    """Whether an expression is `sys.meta_path`, which is None or missing at the end."""
    text = ast.unparse(node)
    return text.endswith("sys.meta_path") or bool(_META_PATH.match(text))


_HARMLESS = {
    "override", "final", "no_type_check", "wraps", "staticmethod", "classmethod", "property",
    "abstractmethod", "overload", "cached_property", "deprecated", "contextmanager", "lru_cache",
    "cache", "setter", "getter",
}  # fmt: skip


def is_wrapped(function: Function) -> bool:
    """Whether a decorator that is not known may catch any exception."""
    return not _HARMLESS.issuperset(function.decorators)
