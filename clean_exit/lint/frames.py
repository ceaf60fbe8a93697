"""A function on the way from a destructor: its object, its variables, what is known there."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from clean_exit.lint.arguments import constant_defaults
from clean_exit.lint.attributes import mangle
from clean_exit.lint.construction import Construction
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts, FrameLike
from clean_exit.lint.findings import Step
from clean_exit.lint.scopes import Class, Function, bound_names, last_name
from clean_exit.lint.values import Bound, Env, External, Given, Instance, Named, Values

# What asks whether the end has come, in the words that are usual.
ENDING = re.compile(
    r"_*(is_|interpreter_|python_)*(finalizing|shutting_?down|exiting|shutdown_started)"
    r"|_*(is_)?(interpreter_shutdown|python_exit_status)"
)


@dataclass(eq=False)
class Frame(FrameLike):
    """A function as it is reached: from where, with which object and arguments.

    Attributes:
        receiver: The object of the method, or the class.
        construction: How the destroyed object was built.
        constants: Parameters whose value is known, as ``blocking=False``.
        conditions: The tests around the statement that is walked.
        ends: What is known where the function returns.
        tested: An attribute of the object was tested on the way: what is set under conditions
            may be used under the same ones.
        quiet: The name by which it was called is reported already as one that may be None; the
            names that it uses itself would say the same again.
        inner: The variables of the comprehensions around what is walked.
        tests: The variables that stand for a test.
        state: The parameters that an attribute of the object was given for.
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
    aliases: dict[str, str] = field(default_factory=dict)
    conditions: list[ast.expr] = field(default_factory=list)
    ends: list[Facts] = field(default_factory=list)
    tested: bool = False
    inner: dict[str, Values] = field(default_factory=dict)
    tests: dict[str, ast.expr] = field(default_factory=dict)
    state: frozenset[str] = frozenset()

    @property
    def env(self) -> Env:
        """Where its expressions stand."""
        return Env(self.function, self.receiver, 0, self.given, self.inner)

    @property
    def is_destructor(self) -> bool:
        """Whether this is the destructor itself."""
        return len(self.trace) == 1

    @property
    def self_name(self) -> str | None:  # type: ignore[override]
        """The name of its object."""
        return self.function.self_name

    def has_at_end(self) -> frozenset[str]:
        """Return the attributes that exist wherever the function has returned."""
        sets = [facts.has for facts in self.ends]
        return frozenset.intersection(*sets) if sets else frozenset()

    def note_test(self, test: ast.expr) -> None:
        """Remember whether a test asks for the object's state."""
        self.tested = self.tested or any(
            isinstance(node, (ast.Attribute, ast.Call)) and self.own_attribute(node)
            for node in ast.walk(test)
        )

    def checks_arguments(self) -> bool:
        """Whether what is walked depends on a test of arguments, which the caller has chosen."""
        own = set(self.function.all_parameters) - {self.self_name} - self.state
        for test in self.conditions if not self.is_destructor else ():
            names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
            if names & own:
                return True
        return False

    def evaluate(self, node: ast.AST) -> Values:
        """Return what an expression of the function may be."""
        return self.evaluator.evaluate(node, self.env)

    def named(self, name: str) -> Named:
        """Say what binds a name."""
        if name in self.inner:
            return Named("local", self.function)
        return self.evaluator.named(self.function, name)

    def is_object(self, node: ast.AST) -> bool:
        """Whether an expression is the object that is destroyed."""
        return isinstance(node, ast.Name) and any(
            isinstance(value, Instance) and value.is_self for value in self.evaluate(node)
        )

    def is_state(self, node: ast.expr) -> bool:
        """Whether an argument is an attribute of the object, and nothing was asked of it."""
        if self.tested:
            return False
        if isinstance(node, ast.Name):
            if node.id in self.state:
                return True
            name = self.aliases.get(node.id)
        else:
            name = self.own_attribute(node)
        return name is not None and all(known != name for known, _ in self.facts.known)

    def is_bound_once(self, name: str) -> bool:
        """Whether a variable has one value only."""
        return list(bound_names(self.function.node)).count(name) == 1

    def mangled(self, name: str) -> str:
        """Return a private attribute's name as Python stores it."""
        function: Function | None = self.function
        while function and not function.owner:
            function = function.parent
        return mangle(name, function.owner) if function and function.owner else name

    def own_attribute(self, node: ast.expr) -> str | None:
        """Return the attribute of the destroyed object that an expression reads, in any way."""
        if isinstance(node, ast.Attribute):
            return self.mangled(node.attr) if self.is_object(node.value) else None
        if not isinstance(node, ast.Call):
            return None
        name = last_name(node.func)
        if name in {"getattr", "hasattr"} and len(node.args) > 1:
            holder, key = node.args[0], node.args[1]
        elif name == "get" and node.args and isinstance(node.func, ast.Attribute):
            held = node.func.value
            if isinstance(held, ast.Call) and last_name(held.func) == "vars" and held.args:
                holder = held.args[0]
            elif isinstance(held, ast.Attribute) and held.attr == "__dict__":
                holder = held.value
            else:
                return None
            key = node.args[0]
        else:
            return None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and self.is_object(holder):
            return key.value
        return None

    def state_name(self, node: ast.expr) -> str | None:
        """Return the name of an attribute, or of a method that is asked without arguments."""
        if name := self.own_attribute(node):
            return name
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        name = self.own_attribute(node.func)
        return f"{name}()" if name else None

    def origin(self, name: str) -> tuple[str, str] | str | None:
        """Return a global with its module's file, or the attribute that a local was read from."""
        if self.named(name).kind == "global":
            return (self.function.module.source.path, name)
        return self.aliases.get(name)

    def implied(self, name: str, truthy: bool) -> frozenset[str]:
        """Return the attributes that exist if one does, or if it is true."""
        own = frozenset({name})
        if name in self.construction.assigned:
            return own | self.construction.implied(name, truthy=truthy)
        return own

    def stands_for(self, node: ast.expr) -> tuple[Frame, ast.expr] | None:
        """Return the test behind a variable, a property or a short function, and its place."""
        if isinstance(node, ast.Name):
            return (self, self.tests[node.id]) if node.id in self.tests else None
        function = self._asked(node)
        if function is None or function.is_async or (test := _only_return(function)) is None:
            return None
        if set(function.all_parameters) - {function.self_name} - set(function.defaults):
            return None
        receiver = Instance(self.destroyed, is_self=True) if function.owner else None
        return Frame(
            self.evaluator,
            function,
            receiver,
            self.construction,
            self.destroyed,
            self.trace,
            self.facts,
            constants=constant_defaults(function),
        ), test

    def _asked(self, node: ast.expr) -> Function | None:
        """Return the object's property, its method or the function that a test asks."""
        if isinstance(node, ast.Attribute) and self.is_object(node.value):
            found = self.evaluator.member(self.destroyed, self.mangled(node.attr))
            asked = found[1] if found else None
            return asked if isinstance(asked, Function) and asked.is_property else None
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return None
        for value in self.evaluate(node.func):
            if isinstance(value, Bound) and value.receiver == Instance(self.destroyed, True):
                return value.function
            if isinstance(value, Function) and value.owner is None:
                return value
        return None

    def asks_for_end(self, node: ast.Call) -> bool:
        """Whether a call asks if the interpreter is finalizing."""
        if ENDING.fullmatch(last_name(node.func)):
            return True
        for value in self.evaluate(node.func):
            if isinstance(value, External) and value.dotted == "sys.is_finalizing":
                return True
            if isinstance(value, Function) and len(value.body) <= 2:
                last = value.body[-1]
                if isinstance(last, ast.Return) and last.value is not None:
                    said = ast.unparse(last.value)
                    if "is_finalizing()" in said and " not " not in f" {said} ":
                        return True
        return False

    def decide(self, node: ast.expr) -> bool | None:
        """Return what a test gives, where the arguments tell; else None."""
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, ast.Name):
            if node.id == "TYPE_CHECKING":
                return False
            return bool(self.constants[node.id]) if node.id in self.constants else None
        if isinstance(node, (ast.Attribute, ast.Call)):
            if isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING":
                return False
            if isinstance(node, ast.Call) and last_name(node.func) == "hasattr":
                return True if self.own_attribute(node) in self.facts.has else None
            name = self.state_name(node)
            if (name, "true") in self.facts.known:
                return True
            is_false = {(name, "false"), (name, "none")} & self.facts.known
            return False if is_false else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.decide(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self.decide(one) for one in node.values]
            stop = isinstance(node.op, ast.Or)
            if stop in parts:
                return stop
            return None if None in parts else not stop
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._decide_identity(node)
        return None

    def _decide_identity(self, node: ast.Compare) -> bool | None:
        """Return what ``x is None`` gives, for a parameter or an attribute that is known."""
        other = node.comparators[0]
        if not isinstance(other, ast.Constant):
            return None
        left, how = node.left, node.ops[0]
        if not isinstance(how, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
            return None
        positive = isinstance(how, (ast.Is, ast.Eq))
        if isinstance(left, ast.Name) and left.id in self.constants:
            return (self.constants[left.id] == other.value) == positive
        name = self.own_attribute(left)
        if name and other.value is None:
            told = {what for attribute, what in self.facts.known if attribute == name}
            if told & {"full", "true"}:
                return not positive
            if "none" in told:
                return positive
        return None


def _only_return(function: Function) -> ast.expr | None:
    """Return what a function returns that does nothing else."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    only = body[0] if len(body) == 1 else None
    return only.value if isinstance(only, ast.Return) else None
