"""How far an object may have come when its construction ends, in the middle or at its end.

`__init__` is read once, from top to bottom, into the methods of the same object that it calls. At
each place that can raise, what the attributes may be by then is an `Exit`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from clean_exit.lint.attributes import mangle, stores
from clean_exit.lint.catching import is_expected
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts
from clean_exit.lint.risks import Risks
from clean_exit.lint.scopes import Class, Function, children, inside, last_name, passed
from clean_exit.lint.values import Bound, Env, Instance, dotted

_DEEPEST = 4
_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}
_MISSING = None
_MayBe = frozenset[bool | None]
_ANY: _MayBe = frozenset({True, False})
State = dict[str, _MayBe]
"""What each attribute may be: true, false, or missing. One that is not in it is missing.

The parameters of the method that is read are in it too, in parentheses, where a test has told.
"""
_ABSENT: _MayBe = frozenset({_MISSING})
# What the destructor has seen of an attribute leaves these.
_LEAVES: dict[str, set[bool | None]] = {
    "true": {True}, "full": {True}, "false": {False, _MISSING}, "none": {False, _MISSING},
    "there": {True, False},
}  # fmt: skip


@dataclass(frozen=True)
class Exit:
    """A way in which the construction ends: after `cause`, which raised, or at its end."""

    state: State
    cause: ast.AST | None = None
    where: Function | None = None


@dataclass
class Construction:
    """Every way in which the construction of a class's objects can end.

    `defaults` are attributes of the class, so they are there in any case.
    """

    cls: Class
    exits: list[Exit]
    is_known: bool
    defaults: set[str]
    assigned: set[str]

    def missing(self, name: str, facts: Facts, *, tested: bool) -> Exit | None:
        """Return a way in which an attribute is not set at the end; None if there is none.

        Where attributes were `tested`, one that is set under conditions may be used under the same
        ones.
        """
        set_by = next((at for at, one in enumerate(self.exits)
                       if one.state.get(name, _ABSENT) != _ABSENT), len(self.exits))  # fmt: skip
        ways = [
            one
            for at, one in enumerate(self.exits)
            if _MISSING in one.state.get(name, _ABSENT)
            and not (tested and (one.cause is None or at >= set_by))
            and all(self._agrees(one, *seen) for seen in facts.began)
        ]
        # What fails in the class's own __init__ says more than what does in a base's.
        own = [one for one in ways if one.where and one.where.owner is self.cls]
        return next(iter(own or ways), None)

    def _agrees(self, way: Exit, name: str, what: str) -> bool:
        if name not in self.assigned or (what == "there" and name in self.defaults):
            return True
        may_be = way.state.get(name, _ABSENT)
        return what not in _LEAVES or not may_be.isdisjoint(_LEAVES[what])


class Constructions:
    """Finds out how the objects of a class are built."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._risks = Risks(evaluator)
        self._known: dict[Class, Construction] = {}

    def of(self, cls: Class) -> Construction:
        """Return the construction of a class."""
        if cls not in self._known:
            self._known[cls] = self._read(cls)
        return self._known[cls]

    def _read(self, cls: Class) -> Construction:
        order, _ = self._evaluator.linear(cls)
        defaults, assigned, start = set(), set(), State()
        for one in reversed(order):
            fields = one.annotations if _FIELDS & _decorators(one) else {}
            for name, value in one.members.items():
                if not _is_field(value):
                    defaults.add(mangle(name, one))
                    start[mangle(name, one)] = _truth(value)
            for name in fields:
                if not _is_not_init(one.members.get(name)):
                    start[name] = _ANY
            for name, settings in self._evaluator.assignments(one).items():
                assigned.add(name)
                if any(function.is_of_class for function, _ in settings):
                    defaults.add(name)  # Set on the class, at whatever time.
            new = one.members.get("__new__")
            for node in inside(new.node) if isinstance(new, Function) else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    start[mangle(node.attr, one)] = _ANY
        way = _Builder(self._evaluator, self._risks, cls)
        method = self._evaluator.method(cls, "__init__")
        method = method or self._evaluator.method(cls, "__post_init__")
        end = way.run(method, start) if method else start
        exits = [*way.exits, *([] if end is None else [Exit(end)])]
        is_known = all(self._is_known(one, base) for one in order for base in one.node.bases)
        is_known = is_known and not way.is_dynamic
        return Construction(cls, exits, is_known, defaults, assigned | set(start))

    def _is_known(self, cls: Class, base: ast.expr) -> bool:
        """Whether a base sets no attributes that are not seen: it was read, or is Python's own."""
        base = base.value if isinstance(base, ast.Subscript) else base
        value = self._evaluator.evaluate(base, Env(cls.outer or cls.scope))
        package = dotted(value).partition(".")[0]
        return isinstance(value, Class) or package in sys.stdlib_module_names


class _Builder:
    """Goes through an ``__init__`` and notes each way out of it."""

    def __init__(self, evaluator: Evaluator, risks: Risks, cls: Class) -> None:
        self.exits: list[Exit] = []
        self.is_dynamic = False
        self._evaluator = evaluator
        self._risks = risks
        self._object = Instance(cls, is_self=True)
        self._stack: list[Function] = []
        self._returns: list[State | None] = []
        self._handlers = 0

    def run(self, function: Function, state: State, call: ast.Call | None = None) -> State | None:
        """Return the state after a method; None if it never returns."""
        outer, self._returns = self._returns, []
        given = passed(function, call, bound=True) if call else {}
        names = {f"({name})": _truth(value) for name, value in given.items()}
        self._stack.append(function)
        end = self._block(function.body, {**_without_names(state), **names})
        self._stack.pop()
        for one in self._returns:
            end = _either(end, one)
        self._returns = outer
        return end and _without_names(end)

    def _block(self, statements: Iterable[ast.stmt], state: State | None) -> State | None:
        for statement in statements:
            if state is None:
                break
            state = self._statement(statement, state)
        return state

    def _statement(self, node: ast.stmt, state: State) -> State | None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return state
        if isinstance(node, (ast.If, ast.While)):
            before = self._expression(node.test, state)
            return _either(
                self._block(node.body, self._where(node.test, True, before)),
                self._block(node.orelse, self._where(node.test, False, before)),
            )
        if isinstance(node, (ast.For, ast.AsyncFor)):
            before = self._expression(node.iter, state)
            return _either(before, self._block([*node.body, *node.orelse], before))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                state = self._stores(item, self._expression(item.context_expr, state))
            return self._block(node.body, state)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, state)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            state = self._expression(node.subject, state)
            end: State | None = state
            for case in node.cases:
                end = _either(end, self._block(case.body, state))
            return end
        state = self._stores(node, self._expression(node, state))
        if isinstance(node, ast.Return):
            self._returns.append(state)
        ends = isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break))
        return None if ends else state

    def _where(self, test: ast.expr, truth: bool, state: State | None) -> State | None:
        """Return what holds where a test has come out so; None if it cannot."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._where(test.operand, not truth, state)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == truth:
            for one in test.values:
                state = self._where(one, truth, state)
            return state
        name = self._name(test)
        if state is None or not name:
            return state
        may_be = state.get(name, _ANY) & {truth}
        return {**state, name: may_be} if may_be else None

    def _name(self, node: ast.expr | None) -> str:
        """Return what a state calls a variable, or an attribute of the object."""
        if isinstance(node, ast.Name):
            return f"({node.id})"
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if is_own and node.value.id == self._stack[-1].self_name else ""  # type: ignore[union-attr]

    def _try(self, node: ast.Try, state: State) -> State | None:
        first = len(self.exits)
        end = self._block(node.orelse, self._block(node.body, state))
        raised = self.exits[first:]
        # What is caught leaves through the handler, which may raise again.
        self.exits[first:] = [one for one in raised if not is_expected(one.cause, node.handlers)]
        begin: State | None = None if raised else state
        for one in raised:
            begin = _either(begin, one.state)
        self._handlers += 1
        for handler in node.handlers:
            end = _either(end, self._block(handler.body, begin))
        self._handlers -= 1
        for at, one in enumerate(self.exits[first:], first):
            final = one.state
            for below in children(node.finalbody):
                final = self._stores(below, final)
            self.exits[at] = Exit(final, one.cause, one.where)
        return self._block(node.finalbody, end)

    def _expression(self, node: ast.AST, state: State | None) -> State:
        """Note what can raise in it, and follow what it calls of its own object."""
        function, called = self._stack[-1], {}
        state = state or {}
        for one in children([node]):
            if isinstance(one, ast.Call):
                self.is_dynamic = self.is_dynamic or _is_dynamic(one, function)
                if (method := self._own_method(one, function)) and method not in self._stack:
                    called[one] = method
        for one in self._risks.of(node, Env(function, self._object)):
            # In a handler something has failed already; that it fails twice is another matter.
            if one not in called and (not self._handlers or isinstance(one, ast.Raise)):
                self.exits.append(Exit(state, one, function))
        for call, method in called.items():
            names = {k: v for k, v in state.items() if k[0] == "("}
            state = {**(self.run(method, state, call) or state), **names}
        return state

    def _own_method(self, node: ast.Call, function: Function) -> Function | None:
        if len(self._stack) > _DEEPEST:
            return None
        first = node.args[0] if node.args else None
        value = self._evaluator.evaluate(node.func, Env(function, self._object))
        if isinstance(value, Bound) and value.receiver == self._object:
            return None if value.function.is_async else value.function
        is_self = isinstance(first, ast.Name) and first.id == function.self_name
        return value if isinstance(value, Function) and value.owner and is_self else None

    def _stores(self, node: ast.AST, state: State) -> State:
        nodes = [node] if isinstance(node, ast.withitem) else children([node])
        new = {}
        for one in nodes:
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                new[f"({one.id})"] = _ANY
            for name, value, _ in stores(one, self._stack[-1]):
                known = state.get(self._name(value), _ANY) - {_MISSING}
                new[name] = known & _truth(value)
        return {**state, **new} if new else state


def _either(first: State | None, second: State | None) -> State | None:
    """Return what may be after either of two ways."""
    if first is None or second is None or first is second:
        return second if first is None else first
    return {name: first.get(name, _ABSENT) | second.get(name, _ABSENT)
            for name in {**first, **second}}  # fmt: skip


def _without_names(state: State) -> State:
    return {name: may_be for name, may_be in state.items() if name[0] != "("}


def _truth(value: object) -> _MayBe:
    if isinstance(value, ast.Constant):
        return frozenset({bool(value.value)})
    if isinstance(value, (ast.List, ast.Tuple)):
        return frozenset({bool(value.elts)})
    return frozenset({bool(value.keys)}) if isinstance(value, ast.Dict) else _ANY


def _is_dynamic(node: ast.Call, function: Function) -> bool:
    """Whether a call sets attributes whose names the source does not say."""
    if last_name(node.func) == "update" and "__dict__" in ast.dump(node.func):
        return True
    return last_name(node.func) == "setattr" and not stores(node, function)


def _decorators(cls: Class) -> set[str]:
    return {last_name(d.func if isinstance(d, ast.Call) else d) for d in cls.node.decorator_list}


def _is_field(value: object) -> bool:
    """Whether a class-level value is a dataclass field that leaves no attribute on the class."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    return not any(keyword.arg == "default" for keyword in value.keywords)


def _is_not_init(value: object) -> bool:
    """Whether a dataclass field is one that nothing sets."""
    if not isinstance(value, ast.Call) or not _is_field(value):
        return False
    said = {k.arg: k.value for k in value.keywords}
    off = said.get("init")
    never = isinstance(off, ast.Constant) and off.value is False
    return never and "default_factory" not in said and "factory" not in said
