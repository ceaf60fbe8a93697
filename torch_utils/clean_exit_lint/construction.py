"""How far an object may have come when its construction ends, in the middle or at its end."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .attributes import mangle, stores
from .risks import Risks
from .scopes import Class, Function, children, last_name
from .values import Bound, Env, Evaluator, Instance

_DEEPEST = 5
_MOST_STATES = 8
_BROAD = {"Exception", "BaseException"}
_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}


@dataclass(frozen=True)
class State:
    """The attributes that are set for sure, those that may be, and those that may be true."""

    sure: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()
    truthy: frozenset[str] = frozenset()

    def set(self, name: str, value: ast.AST | None) -> State:
        """Return the state after an attribute was set."""
        is_false = isinstance(value, ast.Constant) and not value.value
        is_false = (
            is_false
            or (isinstance(value, (ast.List, ast.Tuple)) and not value.elts)
            or (isinstance(value, ast.Dict) and not value.keys)
        )
        truthy = self.truthy - {name} if is_false else self.truthy | {name}
        return State(self.sure | {name}, self.maybe | {name}, truthy)

    def merge(self, other: State) -> State:
        """Return what holds after either of two ways."""
        return State(self.sure & other.sure, self.maybe | other.maybe, self.truthy | other.truthy)


@dataclass(frozen=True)
class Exit:
    """A way in which the construction ends: after `cause`, which raised, or at its end."""

    state: State
    cause: ast.AST | None = None
    where: Function | None = None


@dataclass
class Construction:
    """Every way in which the construction of a class's objects can end."""

    exits: list[Exit]
    is_known: bool
    defaults: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    _implied: dict[tuple[str, bool], frozenset[str]] = field(default_factory=dict)

    def missing(self, name: str, has: frozenset[str], *, tested: bool) -> Exit | None:
        """Return a way in which an attribute is not set at the end; None if there is none.

        What was read before, `has`, was set then. Where attributes were `tested`, a construction
        that came to its end may have left it out on purpose.
        """
        earlier = has & self.assigned
        return next(
            (
                one
                for one in self.exits
                if name not in one.state.sure
                and earlier <= one.state.maybe
                and not (tested and one.cause is None)
            ),
            None,
        )

    def implied(self, name: str, *, truthy: bool = False) -> frozenset[str]:
        """Return the attributes that exist wherever one does, or wherever it is true."""
        key = (name, truthy)
        if key not in self._implied:
            having = [one.state for one in self.exits
                      if name in (one.state.truthy if truthy else one.state.maybe)]  # fmt: skip
            sets = [state.sure for state in having]
            self._implied[key] = frozenset.intersection(*sets) if sets else self.assigned
        return self._implied[key]


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
        order, complete = self._evaluator.linear(cls)
        defaults, assigned, start = set(), set(), State()
        for one in order:
            own = set(one.members) | {n for n, v in one.values.items() if not _is_field(v)}
            defaults |= {mangle(name, one) for name in own}
            assigned |= set(self._evaluator.assignments(one))
            if _FIELDS & _decorators(one):
                for name in one.annotations:
                    if not _is_not_init(one.values.get(name)):
                        start = start.set(name, None)
                        assigned.add(name)
            new = one.members.get("__new__")
            for node in children(new.body) if new else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    start = start.set(mangle(node.attr, one), None)
        begin = Builder(self._evaluator, self._risks, cls)
        found = self._evaluator.member(cls, "__init__")
        if not found or not isinstance(found[1], Function):
            found = self._evaluator.member(cls, "__post_init__")
        if found and isinstance(found[1], Function):
            end = begin.run(found[1], start)
            if end is not None:
                begin.exits.append(Exit(end))
        else:
            begin.exits.append(Exit(start))
        is_known = complete or bool(found)
        is_known = is_known and not begin.is_dynamic
        names = frozenset(assigned) | start.maybe
        return Construction(begin.exits, is_known, frozenset(defaults), names)


class Builder:
    """Goes through an ``__init__`` once, and notes each way out of it."""

    def __init__(self, evaluator: Evaluator, risks: Risks, cls: Class) -> None:
        self.exits: list[Exit] = []
        self.is_dynamic = False
        self._evaluator = evaluator
        self._risks = risks
        self._object = Instance(cls, is_self=True)
        self._stack: list[Function] = []
        self._returns: list[list[State]] = []
        self._handlers = 0

    def run(self, function: Function, state: State) -> State | None:
        """Return the state after a method; None if it never returns."""
        self._stack.append(function)
        self._returns.append([])
        end = self._block(function.body, state)
        self._stack.pop()
        ends = self._returns.pop() + ([end] if end else [])
        return _merge(ends)

    def _block(self, statements: Iterable[ast.stmt], state: State | None) -> State | None:
        for statement in statements:
            if state is None:
                return None
            state = self._statement(statement, state)
        return state

    def _statement(self, node: ast.stmt, state: State) -> State | None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return state
        if isinstance(node, (ast.If, ast.While)):
            state = self._expression(node.test, state)
            after = self._block(node.body, state)
            other = self._block(node.orelse, state)
            return _merge([one for one in (after, other) if one])
        if isinstance(node, (ast.For, ast.AsyncFor)):
            state = self._expression(node.iter, state)
            after = self._block([*node.body, *node.orelse], state)
            return _merge([state, after] if after else [state])
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                state = self._expression(item.context_expr, state)
                state = self._stores(item, state)
            return self._block(node.body, state)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, state)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            state = self._expression(node.subject, state)
            ends = [self._block(case.body, state) for case in node.cases]
            return _merge([state, *[one for one in ends if one]])
        state = self._expression(node, state)
        state = self._stores(node, state)
        if isinstance(node, ast.Return):
            self._returns[-1].append(state)
            return None
        return None if isinstance(node, (ast.Raise, ast.Continue, ast.Break)) else state

    def _try(self, node: ast.Try, state: State) -> State | None:
        first = len(self.exits)
        end = self._block(node.body, state)
        raised = [one.state for one in self.exits[first:]]
        if any(_is_broad(handler) for handler in node.handlers):
            del self.exits[first:]  # Nothing leaves from here but through a handler.
        ends = [self._block(node.orelse, end)]
        begins = list(dict.fromkeys(raised))[:_MOST_STATES] or [state]
        self._handlers += 1
        ends += [self._block(handler.body, one) for handler in node.handlers for one in begins]
        self._handlers -= 1
        if not node.finalbody:
            return _merge([one for one in ends if one])
        for at, one in enumerate(self.exits[first:], first):
            final = _only_stores(node.finalbody, one.state, self._stack[-1])
            self.exits[at] = replace(one, state=final)
        after = _merge([one for one in ends if one])
        return self._block(node.finalbody, after)

    def _expression(self, node: ast.AST, state: State) -> State:
        """Note what can raise in it, and follow what it calls of its own object."""
        function = self._stack[-1]
        env = Env(function, self._object)
        own: list[Function] = []
        inlined: set[int] = set()
        for one in children([node]):
            if not isinstance(one, ast.Call):
                continue
            if last_name(one.func) == "update" and "__dict__" in ast.dump(one.func):
                self.is_dynamic = True
            if last_name(one.func) == "setattr" and not stores(one, function):
                self.is_dynamic = True
            for value in self._evaluator.evaluate(one.func, env)[:1]:
                if (
                    isinstance(value, Bound)
                    and value.receiver == self._object
                    and value.function not in self._stack
                    and len(self._stack) < _DEEPEST
                    and not value.function.is_async
                ):
                    own.append(value.function)
                    inlined.add(id(one))
                elif isinstance(value, Function) and value.owner and _passes_self(one, function):
                    own.append(value)
                    inlined.add(id(one))
        for one in self._risks.of(node, env):
            # In a handler something has failed already; that it fails twice is another matter.
            if id(one) not in inlined and (not self._handlers or isinstance(one, ast.Raise)):
                self.exits.append(Exit(state, one, function))
        for method in own:
            end = self.run(method, state)
            state = end or state
        return state

    def _stores(self, node: ast.AST, state: State) -> State:
        function = self._stack[-1]
        nodes = [node] if isinstance(node, ast.withitem) else list(children([node]))
        for one in nodes:
            for name, by in stores(one, function):
                value = getattr(by, "value", None)
                if isinstance(by, ast.Call):
                    value = by.args[-1]
                if function.owner:
                    name = mangle(name, function.owner)
                state = state.set(name, value)
        return state


def _passes_self(node: ast.Call, function: Function) -> bool:
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Name) and first.id == function.self_name


def _merge(states: list[State]) -> State | None:
    if not states:
        return None
    merged = states[0]
    for one in states[1:]:
        merged = merged.merge(one)
    return merged


def _only_stores(body: list[ast.stmt], state: State, function: Function) -> State:
    for node in children(body):
        for name, _ in stores(node, function):
            state = state.set(mangle(name, function.owner) if function.owner else name, None)
    return state


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or last_name(handler.type) in _BROAD


def _decorators(cls: Class) -> set[str]:
    return {last_name(d.func if isinstance(d, ast.Call) else d) for d in cls.node.decorator_list}


def _is_field(value: ast.expr | None) -> bool:
    """Whether a class-level value is a dataclass field that leaves no attribute on the class."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    return not any(keyword.arg == "default" for keyword in value.keywords)


def _is_not_init(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    said = {k.arg: k.value for k in value.keywords}
    off = said.get("init")
    never = isinstance(off, ast.Constant) and off.value is False
    return _is_field(value) and never and "default_factory" not in said and "factory" not in said
