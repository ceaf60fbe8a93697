"""A function on the way from a destructor: its object, its variables, what is known there."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clean_exit.lint.attributes import mangle
from clean_exit.lint.construction import Construction
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts
from clean_exit.lint.findings import Step
from clean_exit.lint.scopes import Class, Function, last_name, passed
from clean_exit.lint.values import Bound, Env, Given, Instance, Named, Value, dotted

# What asks whether the end has come, by its usual names.
ASKS_FOR_END = re.compile(
    r"_*(is_|interpreter_|python_)*(finalizing|shutting_?down|exiting|shutdown_started)"
    r"|_*(is_)?(interpreter_shutdown|python_exit_status)"
)


@dataclass(eq=False)
class Frame:
    """A function as it is reached: from where, with which object and arguments.

    Attributes:
        receiver: The object of the method, or the class.
        construction: How the destroyed object was built.
        constants: Parameters whose value is known, as ``blocking=False``.
        quiet: The global by which it was called is reported already; the names inside are not
            reported again.
        tested: An attribute of the object was tested on the way: what is set under conditions
            may be used under the same ones.
        aliases: The variables that an attribute of the object was read into.
        tests: The variables that stand for a test.
        conditions: The tests around the statement that is walked.
        ends: What is known where the function returns.
        own_names: The variables of the comprehensions around what is walked.
        is_building: It is a part of the construction, where nothing is found but ways out.
        is_handling: What is walked is inside of a handler: something has failed already.
    """

    evaluator: Evaluator
    function: Function
    receiver: Instance | Class | None
    construction: Construction
    destroyed: Class
    trace: tuple[Step, ...]
    facts: Facts
    given: Given = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    quiet: bool = False
    tested: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    tests: dict[str, ast.expr] = field(default_factory=dict)
    conditions: list[ast.expr] = field(default_factory=list)
    ends: list[Facts] = field(default_factory=list)
    own_names: set[str] = field(default_factory=set)
    is_building: bool = False
    is_handling: bool = False

    def calling(
        self, function: Function, receiver: Instance | Class | None, **changes: object
    ) -> Frame:
        """Return the frame of a function that this one calls."""
        fresh: dict[str, object] = {"aliases": {}, "tests": {}, "conditions": [], "ends": [],
                                    "own_names": set(), **changes}  # fmt: skip
        return replace(self, function=function, receiver=receiver, **fresh)  # type: ignore[arg-type]

    @property
    def env(self) -> Env:
        """Where its expressions stand."""
        return Env(self.function, self.receiver, 0, self.given)

    @property
    def is_destructor(self) -> bool:
        """Whether this is the destructor itself."""
        return len(self.trace) == 1

    @property
    def self_name(self) -> str | None:
        """The name of its object."""
        return self.function.self_name

    @property
    def object(self) -> Instance:
        """The object that is destroyed."""
        return Instance(self.destroyed, is_self=True)

    def note_test(self, test: ast.expr) -> None:
        """Remember whether a test asks for the object's state."""
        self.tested = self.tested or any(self.own_attribute(node) for node in ast.walk(test))

    def checks_arguments(self) -> bool:
        """Whether what is walked depends on a test of arguments, which the caller has chosen."""
        own = set(self.function.all_parameters) - {self.self_name, *self.aliases}
        names = {
            n.id for test in self.conditions for n in ast.walk(test) if isinstance(n, ast.Name)
        }
        return not self.is_destructor and not own.isdisjoint(names)

    def evaluate(self, node: ast.AST) -> Value | None:
        """Return what an expression of the function is, if that is known."""
        return self.evaluator.evaluate(node, self.env)

    def named(self, name: str) -> Named:
        """Say what binds a name."""
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
        """Return the attribute of the destroyed object that an expression reads, in any way."""
        if isinstance(node, ast.Attribute):
            return self.mangled(node.attr) if self.is_object(node.value) else None
        if not isinstance(node, ast.Call) or not node.args:
            return None
        name, holder, key = last_name(node.func), node.args[0], node.args[-1]
        if name in {"getattr", "hasattr"} and len(node.args) > 1:
            key = node.args[1]
        elif name == "get" and isinstance(node.func, ast.Attribute):
            held, key = node.func.value, node.args[0]
            if isinstance(held, ast.Call) and last_name(held.func) == "vars" and held.args:
                holder = held.args[0]
            elif isinstance(held, ast.Attribute) and held.attr == "__dict__":
                holder = held.value
        else:
            return None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and self.is_object(holder):
            return key.value
        return None

    def attribute_behind(self, node: ast.expr) -> str | None:
        """Return the attribute that an expression, or the variable that it is, was read from."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        return self.own_attribute(node)

    def state_name(self, node: ast.expr) -> str | None:
        """Return what facts call an attribute, a parameter, or a method without arguments."""
        if name := self.attribute_behind(node):
            return name
        if isinstance(node, ast.Name) and node.id in self.function.all_parameters:
            return f"({node.id})"
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        name = self.own_attribute(node.func)
        return f"{name}()" if name else None

    def stands_for(self, node: ast.expr) -> tuple[Frame, ast.expr] | None:
        """Return the test behind a variable, a property or a short function, and its place."""
        if isinstance(node, ast.Name):
            return (self, self.tests[node.id]) if node.id in self.tests else None
        function = self._asked(node)
        if function is None or function.is_async or (test := _only_return(function)) is None:
            return None
        if set(function.all_parameters) - {function.self_name} - set(function.defaults):
            return None
        receiver = self.object if function.owner else None
        constants = constants_of(passed(function, None, bound=True))
        return self.calling(function, receiver, constants=constants), test

    def _asked(self, node: ast.expr) -> Function | None:
        """Return the object's property, its method or the function that a test asks."""
        if isinstance(node, ast.Attribute) and self.is_object(node.value):
            asked = self.evaluator.method(self.destroyed, self.mangled(node.attr))
            return asked if asked and asked.is_property else None
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        value = self.evaluate(node.func)
        if isinstance(value, Bound) and value.receiver == self.object:
            return value.function
        return value if isinstance(value, Function) and value.owner is None else None

    def asks_for_end(self, node: ast.Call) -> bool:
        """Whether a call asks if the interpreter is finalizing."""
        value = self.evaluate(node.func)
        if ASKS_FOR_END.fullmatch(last_name(node.func)) or dotted(value) == "sys.is_finalizing":
            return True
        test = _only_return(value) if isinstance(value, Function) else None
        said = ast.unparse(test) if test else ""
        return "is_finalizing()" in said and " not " not in f" {said} "


def constants_of(given: Mapping[str, ast.expr]) -> dict[str, object]:
    """Return the parameters that are given a constant."""
    return {name: one.value for name, one in given.items() if isinstance(one, ast.Constant)}


def _only_return(function: Function) -> ast.expr | None:
    """Return what a function returns that does nothing else."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    only = body[0] if len(body) == 1 else None
    return only.value if isinstance(only, ast.Return) else None
