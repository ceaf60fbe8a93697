"""The functions that a destructor reaches, and what is known at the current node of each."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce

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
from clean_exit.lint.findings import Step
from clean_exit.lint.scopes import Class, Function, bind_arguments, last_name, mangle

# The usual names of functions and attributes that tell whether the interpreter is shutting down.
SHUTDOWN_CHECK = re.compile(
    r"_*(is_|interpreter_|python_)*(finalizing|shutting_?down|exiting|shutdown_started)"
    r"|_*(is_)?(interpreter_shutdown|python_exit_status)"
)


@dataclass(frozen=True)
class Facts:
    """What holds at a point of a destructor.

    Attributes:
        alive: The interpreter is not shutting down.
        caught: The names of the exceptions that a surrounding handler catches.
        there: The attributes of the object that exist, with a dot before the name, and the global
            names that are not None.
        changed: The attributes whose value is not their first one any more.
    """

    alive: bool = False
    caught: frozenset[str] = frozenset()
    there: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def plus(self, other: Facts) -> Facts:
        """Return what holds if both hold."""
        return Facts(self.alive or other.alive, *(
            mine | theirs for mine, theirs in zip(self._sets(), other._sets(), strict=True)
        ))  # fmt: skip

    def common(self, other: Facts) -> Facts:
        """Return what holds on both of two ways to a point."""
        return Facts(self.alive and other.alive, *(
            mine & theirs for mine, theirs in zip(self._sets(), other._sets(), strict=True)
        ))  # fmt: skip

    def _sets(self) -> tuple[frozenset[str], ...]:
        return self.caught, self.there, self.changed

    def has(self, *names: str) -> Facts:
        """Return what holds if attributes or global names are there as well."""
        return replace(self, there=self.there.union(names))

    def catching(self, names: Iterable[str]) -> Facts:
        """Return what holds inside a try statement that catches exceptions."""
        return replace(self, caught=self.caught.union(names))

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})


NOTHING = Facts()
ALIVE = Facts(alive=True)


@dataclass(eq=False)
class Frame:
    """A function during the walk: how it was reached, and what is known at the current node.

    Attributes:
        receiver: The object of the method, or its class.
        construction: What the construction of the destroyed object does.
        destroyed: The class of the destroyed object.
        trace: The functions from the destructor to this one.
        facts: What is known at the current node.
        variables: The values of parameters in this function and those around it.
        constants: The parameters with a known value, such as ``blocking=False``.
        conditions: The number of tests around the current statement.
        ends: What is known at each return.
    """

    evaluator: Evaluator
    function: Function
    receiver: Instance | Class | None
    construction: Construction
    destroyed: Class
    trace: tuple[Step, ...]
    facts: Facts = NOTHING
    variables: Variables = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    conditions: int = 0
    ends: list[Facts] = field(default_factory=list)

    def calling(
        self, function: Function, receiver: Instance | Class | None, node: ast.Call | None
    ) -> Frame:
        """Return the frame of a function that this function calls, with the arguments."""
        variables, constants = dict(self.variables), dict[str, object]()
        if self.function.self_name and self.receiver:
            variables[self.function, self.function.self_name] = self.receiver
        for name, argument in bind_arguments(function, node, bound=receiver is not None).items():
            if isinstance(argument, ast.Constant):
                constants[name] = argument.value
            elif isinstance(argument, ast.Name) and argument.id in self.constants:
                constants[name] = self.constants[argument.id]
            elif value := self.evaluate(argument):
                variables[function, name] = value
                if receiver is None and name == function.self_name and isinstance(value, Instance):
                    receiver = value
        constants = {k: v for k, v in constants.items() if k not in function.names}
        return replace(
            self, function=function, receiver=receiver, variables=variables, constants=constants,
            conditions=0, ends=[],
        )  # fmt: skip

    @property
    def is_destructor(self) -> bool:
        """Whether this is the destructor itself."""
        return len(self.trace) == 1

    @property
    def object(self) -> Instance:
        """The object that is destroyed."""
        return Instance(self.destroyed, is_self=True)

    def evaluate(self, node: ast.AST) -> Value | None:
        """Return the value of an expression of the function, if it is known."""
        return self.evaluator.evaluate(node, Env(self.function, self.receiver, 0, self.variables))

    def named(self, name: str) -> Named:
        """Return the bindings of a name."""
        return self.evaluator.named(self.function, name)

    def is_object(self, node: ast.AST) -> bool:
        """Whether an expression is the object that is destroyed."""
        return isinstance(node, ast.Name) and self.evaluate(node) == self.object

    def own_attribute(self, node: ast.AST) -> str | None:
        """Return the attribute of the destroyed object that an expression reads or checks."""
        if isinstance(node, ast.Attribute):
            function: Function | None = self.function
            while function and not function.owner:
                function = function.parent
            owner = function.owner if function else None
            return mangle(node.attr, owner) if self.is_object(node.value) else None
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

    def checks_shutdown(self, node: ast.Call) -> bool:
        """Whether a call tells if the interpreter is shutting down."""
        is_named = SHUTDOWN_CHECK.fullmatch(last_name(node.func))
        return bool(is_named) or dotted(self.evaluate(node.func)) == "sys.is_finalizing"


# Tests

_MAX_DEPTH = 40  # of nested tests
_INDIRECTION = 15  # the depth that a test in a property or a function adds
_META_PATH = re.compile(r"(getattr\()?_?sys(\.|, ')meta_path(', None\))?")
_OPERATORS: dict[type[ast.cmpop], Callable[..., bool]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def outcome(frame: Frame, node: ast.expr, truth: bool, depth: int = 0) -> Facts | None:
    """Return what holds if a test is true or false; None if arguments rule that out."""
    if depth > _MAX_DEPTH:
        return NOTHING
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return outcome(frame, node.operand, not truth, depth + 1)
    if isinstance(node, ast.BoolOp):
        parts = [outcome(frame, one, truth, depth + 1) for one in node.values]
        known = [part for part in parts if part is not None]
        if isinstance(node.op, ast.And) == truth:
            return reduce(Facts.plus, known) if len(known) == len(parts) else None
        return reduce(Facts.common, known) if known else None
    if isinstance(node, ast.Call) and frame.checks_shutdown(node):
        return NOTHING if truth else ALIVE
    is_hasattr = isinstance(node, ast.Call) and last_name(node.func) == "hasattr"
    if is_hasattr and not truth and not frame.own_attribute(node):
        return None  # What another object gets at its first use is there by now.
    if isinstance(node, ast.Compare) and _META_PATH.fullmatch(ast.unparse(node.left)):
        return ALIVE if isinstance(node.ops[0], ast.IsNot) == truth else NOTHING
    if _differs(frame, node, truth, _argument):
        return None
    # A property or a short function stands for the test that it returns.
    behind = _test_behind(frame, node)
    more = outcome(*behind, truth, depth + _INDIRECTION) if behind else NOTHING
    there = _differs(frame, node, truth, _missing) | _exists(frame, node, truth)
    changed = _differs(frame, node, truth, _first_value)
    own = Facts(there=there, changed=changed)
    return None if more is None else own.plus(more)


Assumption = Callable[[Frame, ast.expr], "tuple[str, object] | None"]
"""The name and the supposed value of an expression; None if it has none."""


def _argument(frame: Frame, node: ast.expr) -> tuple[str, object] | None:
    """Suppose that a parameter has the value that the call passes."""
    if isinstance(node, ast.Name) and node.id in frame.constants:
        return node.id, frame.constants[node.id]
    return None


def _missing(frame: Frame, node: ast.expr) -> tuple[str, object] | None:
    """Suppose that a global name is None, or that an attribute is missing."""
    if isinstance(node, ast.Name) and frame.named(node.id).kind == "global":
        return node.id, None
    name = frame.own_attribute(node)
    if not name or not isinstance(node, ast.Call) or last_name(node.func) == "hasattr":
        return None
    default = node.args[2 if last_name(node.func) == "getattr" else 1 :]
    if default and not isinstance(default[0], ast.Constant):
        return None
    return f".{name}", default[0].value if default else None  # type: ignore[attr-defined]


def _first_value(frame: Frame, node: ast.expr) -> tuple[str, object] | None:
    """Suppose that an attribute has its first value."""
    name = frame.own_attribute(node)
    if not name or name not in frame.construction.first_values:
        return None
    return f".{name}", frame.construction.first_values[name]


def _differs(frame: Frame, node: ast.expr, truth: bool, suppose: Assumption) -> frozenset[str]:
    """Return the names whose supposed values give a test another outcome."""
    names: set[str] = set()

    def value(part: ast.expr) -> object:
        if isinstance(part, ast.NamedExpr):
            part = part.value
        if supposed := suppose(frame, part):
            names.add(supposed[0])
            return supposed[1]
        if isinstance(part, ast.Call) and last_name(part.func) in {"callable", "isinstance"}:
            if part.args and value(part.args[0]) is None:
                return False
            raise LookupError
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and type(part.ops[0]) in _OPERATORS:
            return _OPERATORS[type(part.ops[0])](value(part.left), value(part.comparators[0]))
        try:
            return ast.literal_eval(part)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise LookupError from None

    try:
        result = bool(value(node))
    except LookupError:
        return frozenset()
    except TypeError:  # None has no order, so a comparison by size shows another value.
        return frozenset(names)
    return frozenset(names) if result != truth else frozenset()


def _exists(frame: Frame, node: ast.expr, truth: bool) -> frozenset[str]:
    """Return the attribute that ``hasattr`` or ``"name" in self.__dict__`` shows."""
    name = None
    if isinstance(node, ast.Call) and last_name(node.func) == "hasattr":
        name = frame.own_attribute(node)
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        truth = truth == isinstance(node.ops[0], ast.In)
        holder, me = ast.unparse(node.comparators[0]), frame.function.self_name
        if holder in {f"{me}.__dict__", f"vars({me})", f"dir({me})"}:
            name = getattr(node.left, "value", None)
    return frozenset({f".{name}"}) if truth and name else frozenset()


def _test_behind(frame: Frame, node: ast.expr) -> tuple[Frame, ast.expr] | None:
    """Return the test that a property, a method or a function without arguments returns."""
    value: object = None
    if isinstance(node, ast.Attribute) and (name := frame.own_attribute(node)):
        method = frame.evaluator.method(frame.destroyed, name)
        value = method if method and method.is_property else None
    elif isinstance(node, ast.Call) and not node.args and not node.keywords:
        value = frame.evaluate(node.func)
    is_own = not isinstance(value, Bound) or value.receiver == frame.object
    function = value.function if isinstance(value, Bound) else value
    if not isinstance(function, Function) or not is_own:
        return None
    last = function.body[-1]
    if not isinstance(last, ast.Return) or not last.value or len(function.body) > 2:
        return None
    return frame.calling(function, frame.object if function.owner else None, None), last.value
