"""The functions that a destructor reaches, and what is known at the current node of each."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from clean_exit.lint.construction import Construction
from clean_exit.lint.evaluator import (
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
ALIVE = "sys.is_finalizing"
"""Among the facts: a shutdown check has said no."""
_META_PATH = re.compile(r"(getattr\()?_?sys(\.|, ')meta_path(', None\))?")
_OPERATORS: dict[type[ast.cmpop], Callable[..., bool]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@dataclass(eq=False)
class Frame:
    """A function during the walk: how it was reached, and what is known at the current node.

    Attributes:
        receiver: The object of the method, or its class.
        construction: What the construction of the destroyed object does.
        destroyed: The class of the destroyed object.
        trace: The functions from the destructor to this one.
        used: The attributes of the object that the destructor has read or asked for so far.
        stored: The attributes of the object that it has set.
        facts: `ALIVE` if a test has shown it, and the global names that a test has looked at. The
            attributes that have not their first value any more have a dot before them.
        caught: The names of the exceptions that a surrounding handler catches.
        variables: The values of parameters in this function and those around it.
        constants: The parameters with a known value, such as ``blocking=False``.
        conditions: The number of tests around the current statement.
    """

    evaluator: Evaluator
    function: Function
    receiver: Instance | Class | None
    construction: Construction
    destroyed: Class
    trace: tuple[Step, ...]
    used: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    facts: frozenset[str] = frozenset()
    caught: frozenset[str] = frozenset()
    variables: Variables = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    conditions: int = 0

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
            conditions=0, facts=frozenset(one for one in self.facts if "." in one),
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
        return self.evaluator.evaluate(node, Env(self.function, self.receiver, self.variables))

    def named(self, name: str) -> Named:
        """Return the bindings of a name."""
        return self.evaluator.named(self.function, name)

    def is_object(self, node: ast.AST) -> bool:
        """Whether an expression is the object that is destroyed."""
        return isinstance(node, ast.Name) and self.evaluate(node) == self.object

    def own_attribute(self, node: ast.AST) -> str | None:
        """Return the attribute of the destroyed object that an expression is."""
        if not isinstance(node, ast.Attribute):
            return None
        function: Function | None = self.function
        while function and not function.owner:
            function = function.parent
        owner = function.owner if function else None
        return mangle(node.attr, owner) if self.is_object(node.value) else None

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter is not shutting down."""
        return ALIVE in self.facts

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})

    def checks_shutdown(self, node: ast.Call) -> bool:
        """Whether a call tells if the interpreter is shutting down."""
        is_named = SHUTDOWN_CHECK.fullmatch(last_name(node.func))
        return bool(is_named) or dotted(self.evaluate(node.func)) == "sys.is_finalizing"

    def shown(self, test: ast.expr, truth: bool) -> frozenset[str] | None:
        """Return the facts that hold if a test is true or false; None if it cannot be so."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.shown(test.operand, not truth)
        if isinstance(test, ast.BoolOp):
            parts = [self.shown(one, truth) for one in test.values]
            known = [part for part in parts if part is not None]
            if isinstance(test.op, ast.And) == truth:
                return frozenset().union(*known) if len(known) == len(parts) else None
            return frozenset.intersection(*known) if known else None
        if isinstance(test, ast.Call):
            if self.checks_shutdown(test):
                return frozenset() if truth else frozenset({ALIVE})
            is_own = any(map(self.is_object, test.args[:1]))
            if last_name(test.func) == "hasattr" and not truth and not is_own:
                return None  # What another object gets at its first use is there by now.
        if isinstance(test, ast.Compare) and _META_PATH.fullmatch(ast.unparse(test.left)):
            return frozenset({ALIVE} if isinstance(test.ops[0], ast.IsNot) == truth else ())
        names: set[str] = set()
        try:
            is_known = bool(_value(self, test, names)) == truth
        except ValueError:
            is_known, names = True, set()
        except TypeError:  # None has no order, so a comparison by size shows another value.
            is_known = False
        if is_known:
            names = set()
        elif not any(name.startswith(".") for name in names):
            return None
        # A test of a global name is a guard for it, whatever it asks.
        used = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
        return frozenset(names).union(one for one in used if self.named(one).kind == "global")


def _value(frame: Frame, node: ast.expr, names: set[str]) -> object:
    """Return the value of an expression if attributes have their first values.

    Args:
        frame: The function with the expression.
        node: The expression.
        names: Gets the parameters and attributes that it depends on.

    Raises:
        ValueError: The value is not known.
        TypeError: It compares values that have no order.
    """
    key = node.id if isinstance(node, ast.Name) else f".{frame.own_attribute(node)}"
    for values, name in ((frame.constants, key), (frame.construction.first_values, key[1:])):
        if name in values:
            names.add(key)
            return values[name]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        left, right = (_value(frame, one, names) for one in (node.left, node.comparators[0]))
        return _OPERATORS[type(node.ops[0])](left, right)
    return ast.literal_eval(node)
