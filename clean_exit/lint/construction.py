"""How far an object may have come when its construction ends, in the middle or at its end."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from clean_exit.lint.attributes import mangle, stores
from clean_exit.lint.catching import is_expected
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts
from clean_exit.lint.risks import Risks
from clean_exit.lint.scopes import Class, Function, children, last_name
from clean_exit.lint.values import Bound, Env, Instance

_DEEPEST = 5
_MOST_STATES = 8
_MOST_STEPS = 2000  # Statements; after so many, ways are no longer told apart.
_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}


@dataclass(frozen=True)
class State:
    """The attributes that are set for sure, those that may be, and those that may be true.

    `truths` has parameters, and attributes with ``self.`` before them, that are known to be true
    or false.
    """

    sure: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()
    truthy: frozenset[str] = frozenset()
    truths: frozenset[tuple[str, bool]] = frozenset()

    def set(self, name: str, value: ast.AST | None) -> State:
        """Return the state after an attribute was set."""
        is_false = _is_false(value)
        truthy = self.truthy - {name} if is_false else self.truthy | {name}
        key = f"self.{name}"
        truths = {one for one in self.truths if one[0] != key}
        if isinstance(value, ast.Constant) or is_false:
            truths.add((key, not is_false))
        elif isinstance(value, ast.Name):
            truths |= {(key, truth) for told, truth in self.truths if told == value.id}
        return State(self.sure | {name}, self.maybe | {name}, truthy, frozenset(truths))

    def told(self, truths: Iterable[tuple[str, bool]]) -> State | None:
        """Return the state if this is so; None if it is known not to be."""
        if any((name, not truth) in self.truths for name, truth in truths):
            return None
        return replace(self, truths=self.truths | set(truths))

    def merge(self, other: State) -> State:
        """Return what holds after either of two ways."""
        return State(
            self.sure & other.sure,
            self.maybe | other.maybe,
            self.truthy | other.truthy,
            self.truths & other.truths,
        )

    def contradicts(self, known: Iterable[tuple[str, str]]) -> bool:
        """Whether tests of attributes in the destructor have ruled this state out."""
        is_true = {"true": True, "false": False, "none": False}
        return any(
            (f"self.{name}", not is_true[what]) in self.truths
            for name, what in known
            if what in is_true
        )


@dataclass(frozen=True)
class Exit:
    """A way in which the construction ends: after `cause`, which raised, or at its end."""

    state: State
    cause: ast.AST | None = None
    where: Function | None = None


@dataclass
class Construction:
    """Every way in which the construction of a class's objects can end.

    `defaults` are there in any case, `falsy` are those of them that begin as None, 0 or the like.
    """

    cls: Class
    exits: list[Exit]
    is_known: bool
    defaults: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    falsy: frozenset[str] = frozenset()
    _implied: dict[tuple[str, bool], frozenset[str]] = field(default_factory=dict)

    def missing(self, name: str, facts: Facts, *, tested: bool) -> Exit | None:
        """Return a way in which an attribute is not set at the end; None if there is none.

        What was read before was set then. Where attributes were `tested`, one that is set under
        conditions may be used under the same ones.
        """
        made = {attribute for attribute, what in facts.began if what == "made"}
        earlier = (facts.has & self.assigned) - self.defaults - made
        set_before = [at for at, one in enumerate(self.exits) if name in one.state.maybe]
        conditional = set_before[0] if set_before else len(self.exits)  # The first that has it.
        told = {attribute for attribute, what in facts.began if what in {"true", "full"}}
        ways = [
            one
            for at, one in enumerate(self.exits)
            if name not in one.state.sure
            and earlier <= one.state.maybe
            and told & self.falsy <= one.state.truthy
            and not (tested and (one.cause is None or at >= conditional))
            and not one.state.contradicts(facts.began)
        ]
        # What fails in the class's own __init__ says more than what does in a base's.
        own = [one for one in ways if one.where and one.where.owner is self.cls]
        return next(iter(own or ways), None)

    def implied(self, name: str, *, truthy: bool = False) -> frozenset[str]:
        """Return the attributes that exist wherever one does, or wherever it is true."""
        if name in self.defaults and not truthy:
            return frozenset()  # It is there from the beginning.
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
        defaults, assigned, falsy, start = set(), set(), set(), State()
        begin: dict[str, bool] = {}  # What the class's own attributes are, nearest class first.
        for one in order:
            own = set(one.members) | {n for n, v in one.values.items() if not _is_field(v)}
            defaults |= {mangle(name, one) for name in own}
            falsy |= {mangle(n, one) for n, v in one.values.items() if _is_false(v)}
            told = {f"self.{mangle(n, one)}": bool(v.value) for n, v in one.values.items()
                    if isinstance(v, ast.Constant)}  # fmt: skip
            begin = {**told, **begin}
            for name, setting in self._evaluator.assignments(one).items():
                assigned.add(name)
                if any("classmethod" in function.decorators for function, _ in setting):
                    defaults.add(name)  # Set on the class, at whatever time.
            if _FIELDS & _decorators(one):
                for name in one.annotations:
                    if not _is_not_init(one.values.get(name)):
                        start = start.set(name, None)
                        assigned.add(name)
            new = one.members.get("__new__")
            for node in children(new.body) if new else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    start = start.set(mangle(node.attr, one), None)
        start = replace(start, truths=frozenset({**begin, **dict(start.truths)}.items()))
        way = Builder(self._evaluator, self._risks, cls)
        found = self._evaluator.member(cls, "__init__")
        if not found or not isinstance(found[1], Function):
            found = self._evaluator.member(cls, "__post_init__")
        if found and isinstance(found[1], Function):
            way.exits += [Exit(end) for end in way.run(found[1], [start])]
        else:
            way.exits.append(Exit(start))
        is_known = complete or bool(found)
        is_known = is_known and not way.is_dynamic
        names = frozenset(assigned) | start.maybe
        return Construction(cls, way.exits, is_known, frozenset(defaults), names, frozenset(falsy))


# A node, so that it stays and with it its id; the methods by calls; what can raise.
_Look = tuple[ast.AST, dict[int, Function], list[ast.AST]]


class Builder:
    """Goes through an ``__init__`` once, way by way, and notes each way out of it."""

    def __init__(self, evaluator: Evaluator, risks: Risks, cls: Class) -> None:
        self.exits: list[Exit] = []
        self.is_dynamic = False
        self._evaluator = evaluator
        self._risks = risks
        self._object = Instance(cls, is_self=True)
        self._stack: list[Function] = []
        self._returns: list[list[State]] = []
        self._handlers = 0
        self._steps = 0
        self._read: dict[tuple[int, Function], _Look] = {}

    def run(self, function: Function, states: list[State]) -> list[State]:
        """Return the states after a method; none if it never returns."""
        self._stack.append(function)
        self._returns.append([])
        own = set(function.all_parameters)
        ends = self._block(function.body, [_without(one, own) for one in states])
        self._stack.pop()
        return _few([_without(one, own) for one in [*self._returns.pop(), *ends]])

    def _block(self, statements: Iterable[ast.stmt], states: list[State]) -> list[State]:
        for statement in statements:
            self._steps += len(states)
            most = _MOST_STATES if self._steps < _MOST_STEPS else 1
            states = _few([end for one in states for end in self._statement(statement, one)], most)
        return states

    def _statement(self, node: ast.stmt, state: State) -> list[State]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return [state]
        if isinstance(node, (ast.If, ast.While)):
            return self._branch(node, state)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            states = self._expression(node.iter, state)
            return [*states, *self._block([*node.body, *node.orelse], states)]
        if isinstance(node, (ast.With, ast.AsyncWith)):
            states = [state]
            for item in node.items:
                states = [self._stores(item, after) for one in states
                          for after in self._expression(item.context_expr, one)]  # fmt: skip
            return self._block(node.body, states)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, state)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            states = self._expression(node.subject, state)
            return states + [end for case in node.cases for end in self._block(case.body, states)]
        states = [self._stores(node, one) for one in self._expression(node, state)]
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)
                  and isinstance(n.ctx, ast.Store)}  # fmt: skip
        states = [_without(one, stored) for one in states] if stored else states
        if isinstance(node, ast.Return):
            self._returns[-1] += states
            return []
        return [] if isinstance(node, (ast.Raise, ast.Continue, ast.Break)) else states

    def _branch(self, node: ast.If | ast.While, state: State) -> list[State]:
        ends: list[State] = []
        for one in self._expression(node.test, state):
            for truth, body in ((True, node.body), (False, node.orelse)):
                told = one.told(_truths(node.test, truth, self._stack[-1].self_name))
                ends += self._block(body, [told]) if told else []
        return ends

    def _try(self, node: ast.Try, state: State) -> list[State]:
        first = len(self.exits)
        ends = self._block(node.orelse, self._block(node.body, [state]))
        raised = [one.state for one in self.exits[first:]]
        # What is caught leaves through the handler, which may raise again.
        self.exits[first:] = [
            one for one in self.exits[first:] if not is_expected(one.cause, node.handlers)
        ]
        begins = list(dict.fromkeys(raised))[:_MOST_STATES] or [state]
        self._handlers += 1
        for handler in node.handlers:
            ends += self._block(handler.body, begins)
        self._handlers -= 1
        if not node.finalbody:
            return ends
        for at, one in enumerate(self.exits[first:], first):
            final = _only_stores(node.finalbody, one.state, self._stack[-1])
            self.exits[at] = replace(one, state=final)
        return self._block(node.finalbody, ends)

    def _expression(self, node: ast.AST, state: State) -> list[State]:
        """Note what can raise in it, and follow what it calls of its own object."""
        function = self._stack[-1]
        key = (id(node), function)
        if key not in self._read:
            self._read[key] = self._look_into(node, function)
        _, called, risky = self._read[key]
        own = {call: method for call, method in called.items()
               if method not in self._stack and self._is_worth_entering()}  # fmt: skip
        for one in risky:
            # In a handler something has failed already; that it fails twice is another matter.
            if id(one) not in own and (not self._handlers or isinstance(one, ast.Raise)):
                self.exits.append(Exit(state, one, function))
        states = [state]
        for method in own.values():
            states = self.run(method, states)
        return states

    def _is_worth_entering(self) -> bool:
        return len(self._stack) < _DEEPEST and self._steps < _MOST_STEPS

    def _look_into(self, node: ast.AST, function: Function) -> _Look:
        """Return the methods of the object that an expression calls, and what in it can raise."""
        env = Env(function, self._object)
        called: dict[int, Function] = {}
        for one in children([node]):
            if not isinstance(one, ast.Call):
                continue
            if last_name(one.func) == "update" and "__dict__" in ast.dump(one.func):
                self.is_dynamic = True
            if last_name(one.func) == "setattr" and not stores(one, function):
                self.is_dynamic = True
            for value in self._evaluator.evaluate(one.func, env)[:1]:
                if isinstance(value, Bound) and value.receiver == self._object:
                    if not value.function.is_async:
                        called[id(one)] = value.function
                elif isinstance(value, Function) and value.owner and _passes_self(one, function):
                    called[id(one)] = value
        return node, called, list(self._risks.of(node, env))

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


def _few(states: list[State], most: int = _MOST_STATES) -> list[State]:
    """Return the states once each; those that are too many are taken together."""
    states = list(dict.fromkeys(states))
    while len(states) > most:
        states.append(states.pop().merge(states.pop()))
    return states


def _without(state: State, names: set[str]) -> State:
    """Return a state without what is known of some variables."""
    return replace(state, truths=frozenset(one for one in state.truths if one[0] not in names))


def _is_false(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Constant):
        return not value.value
    if isinstance(value, (ast.List, ast.Tuple)):
        return not value.elts
    return isinstance(value, ast.Dict) and not value.keys


def _truths(test: ast.expr, truth: bool, self_name: str | None) -> list[tuple[str, bool]]:
    """Return what a test tells, if it comes out so, of parameters and attributes."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truths(test.operand, not truth, self_name)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == truth:
        return [told for one in test.values for told in _truths(one, truth, self_name)]
    if isinstance(test, ast.Name):
        return [(test.id, truth)]
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name):
        return [(f"self.{test.attr}", truth)] if test.value.id == self_name else []
    return []


def _only_stores(body: list[ast.stmt], state: State, function: Function) -> State:
    for node in children(body):
        for name, _ in stores(node, function):
            state = state.set(mangle(name, function.owner) if function.owner else name, None)
    return state


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
