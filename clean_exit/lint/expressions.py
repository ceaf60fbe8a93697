"""Goes through the expressions of a destructor, and into what they call."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import NamedTuple, Protocol

from clean_exit.lint.arguments import constant_defaults, is_open, match_arguments
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts, Tests, is_meta_path, plain_test
from clean_exit.lint.findings import Step
from clean_exit.lint.frames import ENDING, Frame
from clean_exit.lint.project import distribution
from clean_exit.lint.scopes import Class, Function, items, last_name
from clean_exit.lint.values import Bound, Given, Instance, Value, Values

_DEEPEST = 6  # Functions in a row: further away, what is reached depends on too much else.
_MOST = 400  # Functions entered for one destructor, with different facts.


class Report(Protocol):
    """Takes a finding."""

    def __call__(self, rule: str, node: ast.AST, what: str, frame: Frame) -> None:
        """Note that a rule is broken at a place."""


class Rules(Protocol):
    """What looks at each place that is reached."""

    def on_call(self, visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
        """Look at a call."""

    def on_name(self, visit: Expressions, frame: Frame, node: ast.Name) -> None:
        """Look at a name that is read."""

    def on_attribute(self, visit: Expressions, frame: Frame, node: ast.expr, name: str) -> None:
        """Look at an attribute of the object that is read."""

    def on_statement(self, visit: Expressions, frame: Frame, node: ast.AST) -> None:
        """Look at a statement, or a handler of exceptions."""

    def on_with(self, visit: Expressions, frame: Frame, node: ast.expr, values: Values) -> None:
        """Look at what a with block enters."""


class Expressions:
    """Walks expressions; what a function's statements are, a subclass knows."""

    def __init__(self, evaluator: Evaluator, rules: Rules, report: Report) -> None:
        self.evaluator = evaluator
        self.report = report
        self._rules = rules
        self._seen: dict[object, Facts] = {}

    def _run(self, frame: Frame) -> None:
        raise NotImplementedError

    def _store(self, frame: Frame, target: ast.expr, value: ast.expr) -> None:
        raise NotImplementedError

    def _expressions(self, frame: Frame, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(frame, child)
            elif not isinstance(child, (ast.expr_context, ast.operator, ast.pattern)):
                self._expressions(frame, child)

    def _test(self, frame: Frame, node: ast.expr) -> None:
        """Walk what is only asked whether it is true: a name that is None does no harm there."""
        node = plain_test(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._test(frame, node.operand)
        elif isinstance(node, ast.BoolOp):
            self._bool_op(frame, node)
        elif not isinstance(node, ast.Name):
            self._expression(frame, node)

    def _bool_op(self, frame: Frame, node: ast.BoolOp) -> None:
        after_first = None
        for one in node.values:
            self._test(frame, one)
            after_first = after_first or frame.facts
            true, false = Tests(frame).split(one)
            frame.facts = frame.facts.plus(true if isinstance(node.op, ast.And) else false)
        frame.facts = after_first or frame.facts

    def _expression(self, frame: Frame, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self._rules.on_name(self, frame, node)
        elif isinstance(node, ast.Attribute):
            if ENDING.fullmatch(node.attr) or is_meta_path(node):
                return
            self._expression(frame, node.value)
            if name := frame.own_attribute(node):
                self._attribute(frame, node, name)
            else:
                self._properties(frame, node)
        elif isinstance(node, ast.Call):
            self._call(frame, node)
        elif isinstance(node, ast.BoolOp):
            self._bool_op(frame, node)
        elif isinstance(node, ast.IfExp):
            self._if_expression(frame, node)
        elif isinstance(node, ast.NamedExpr):
            self._expression(frame, node.value)
            self._store(frame, node.target, node.value)
        elif isinstance(node, ast.Compare) and is_none_test(node):
            for one in (node.left, *node.comparators):
                self._test(frame, one)
        elif isinstance(node, ast.Lambda):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._expression(frame, default)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self._comprehension(frame, node)
        else:
            self._expressions(frame, node)

    def _if_expression(self, frame: Frame, node: ast.IfExp) -> None:
        self._test(frame, node.test)
        before = frame.facts
        for facts, one in zip(Tests(frame).split(node.test), (node.body, node.orelse), strict=True):
            frame.facts = before.plus(facts)
            self._expression(frame, one)
        frame.facts = before

    def _comprehension(
        self, frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        before, inner = None, frame.inner
        for part in node.generators:
            self._expression(frame, part.iter)
            before = before or frame.facts
            frame.inner = frame.inner | self._items(frame, part)
            for test in part.ifs:
                self._test(frame, test)
                frame.facts = frame.facts.plus(Tests(frame).split(test)[0])
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for one in parts:
            self._expression(frame, one)
        frame.facts, frame.inner = before or frame.facts, inner

    def _items(self, frame: Frame, part: ast.comprehension) -> dict[str, Values]:
        """Return the variables of a comprehension, with what they may be."""
        bound = [one.id for one in ast.walk(part.target) if isinstance(one, ast.Name)]
        return {
            name: tuple(
                value
                for of in items(part.target, part.iter, name)
                for value in self.evaluator.elements.of(of, frame.env)
            )
            for name in bound
        }

    def _attribute(self, frame: Frame, node: ast.expr, name: str) -> None:
        found = self.evaluator.member(frame.destroyed, name)
        if found and isinstance(found[1], Function):
            if found[1].is_property:
                self._follow(frame, found[1], Instance(frame.destroyed, is_self=True), None)
            return
        self._rules.on_attribute(self, frame, node, name)
        has = frozenset({name}) | frame.implied(name, truthy=False)
        frame.facts = frame.facts.plus(Facts(has=has))

    def _properties(self, frame: Frame, node: ast.Attribute) -> None:
        for value in frame.evaluate(node.value):
            if isinstance(value, Instance):
                found = self.evaluator.member(value.cls, node.attr)
                if found and isinstance(found[1], Function) and found[1].is_property:
                    self._follow(frame, found[1], value, None)

    # Calls

    def _call(self, frame: Frame, node: ast.Call) -> None:
        if frame.asks_for_end(node):
            return
        is_plain = last_name(node.func) == "getattr" and len(node.args) == 2
        if is_plain and (name := frame.own_attribute(node)):
            self._attribute(frame, node, name)
        self._expression(frame, node.func)
        has_default = last_name(node.func) == "getattr" and len(node.args) == 3
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            if has_default and one is node.args[0]:
                self._test(frame, one)  # None has no such attribute, and the default is taken.
            else:
                self._expression(frame, one)
        values = frame.evaluate(node.func)
        self._rules.on_call(self, frame, node, values)
        for value in values:
            self._enter(frame, value, node)

    def _enter(self, frame: Frame, value: Value, node: ast.Call) -> None:
        if isinstance(value, Class):
            for name in ("__init__", "__post_init__"):
                self._follow_member(frame, Instance(value), name, node)
        elif isinstance(value, Function):
            self._follow(frame, value, None, node)
        elif isinstance(value, Bound):
            self._follow(frame, value.function, value.receiver, node)
        elif isinstance(value, Instance):
            self._follow_member(frame, value, "__call__", node)

    def _follow_member(
        self, frame: Frame, value: Instance, name: str, node: ast.Call | None = None
    ) -> None:
        found = self.evaluator.member(value.cls, name)
        if found and isinstance(found[1], Function):
            self._follow(frame, found[1], value, node)

    def _follow(
        self,
        frame: Frame,
        function: Function,
        receiver: Instance | Class | None,
        node: ast.Call | None,
    ) -> None:
        """Walk a function that is called from another one."""
        if function.is_async or len(frame.trace) >= _DEEPEST or len(self._seen) > _MOST:
            return
        here, there = frame.function.module.source.path, function.module.source.path
        if here != there and distribution(here) != distribution(there):
            return
        receiver, given, constants, state = _passed(frame, function, receiver, node)
        is_self = isinstance(receiver, Instance) and receiver.is_self
        reaches = is_self or any(
            isinstance(one, Instance) and one.is_self for values in given.values() for one in values
        )
        facts = frame.facts
        if not reaches:
            facts = replace(facts, has=frozenset(), known=frozenset(), began=frozenset())
        quiet = frame.quiet or (node is not None and self._is_by_global(frame, node.func))
        key = (function, receiver, facts, tuple(sorted(constants.items(), key=repr)),
               quiet, state)  # fmt: skip
        if key in self._seen:
            frame.facts = frame.facts.plus(self._seen[key])
            return
        line = function.node.lineno
        if any(step.line == line and step.path == there for step in frame.trace):
            return
        self._seen[key] = Facts()
        own = is_self and function.owner in self.evaluator.linear(frame.destroyed)[0][:1]
        bare = own or (is_self and function is _resolved(self.evaluator, frame.destroyed, function))
        step = Step(function.name if bare else function.label, there, line)
        inner = Frame(
            self.evaluator,
            function,
            receiver,
            frame.construction,
            frame.destroyed,
            (*frame.trace, step),
            facts,
            given,
            constants,
            quiet,
            tested=frame.tested,
            state=state,
        )
        self._run(inner)
        if is_self:  # What it has read of the object, wherever it returns, is there.
            self._seen[key] = Facts(has=inner.has_at_end())
            frame.facts = frame.facts.plus(self._seen[key])

    def _is_by_global(self, frame: Frame, node: ast.expr) -> bool:
        """Whether a function was called by a name that is looked up in its module."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            return False
        return frame.named(node.id).kind == "global"


class _Passed(NamedTuple):
    """What a function is entered with; see `Frame`."""

    receiver: Instance | Class | None
    given: Given
    constants: dict[str, object]
    state: frozenset[str]


def _passed(
    frame: Frame, function: Function, receiver: Instance | Class | None, node: ast.Call | None
) -> _Passed:
    """Say what a call passes on, or a function that is called without one in sight."""
    given = dict(frame.given)
    constants = constant_defaults(function)
    state = set()
    if frame.function.self_name and frame.receiver:
        given[frame.function, frame.function.self_name] = (frame.receiver,)
    if node is not None:
        arguments = match_arguments(function, node, bound=receiver is not None)
        if is_open(node):
            constants = {}
        for name, argument in arguments.items():
            constants.pop(name, None)
            if frame.is_state(argument):
                state.add(name)
            if isinstance(argument, ast.Constant):
                constants[name] = argument.value
            elif isinstance(argument, ast.Name) and argument.id in frame.constants:
                constants[name] = frame.constants[argument.id]
            elif values := frame.evaluate(argument):
                given[function, name] = values
        if receiver is None and function.self_name in arguments:
            held = given.get((function, function.self_name or ""), ())
            receiver = next((one for one in held if isinstance(one, Instance)), None)
    return _Passed(receiver, given, constants, frozenset(state))


def _resolved(evaluator: Evaluator, cls: Class, function: Function) -> object:
    found = evaluator.member(cls, function.name)
    return found[1] if found else None


def is_none_test(node: ast.Compare) -> bool:
    """Whether something is compared with None, which is as harmless for a name that is None."""
    sides = (node.left, *node.comparators)
    return len(node.ops) == 1 and any(
        isinstance(one, ast.Constant) and one.value is None for one in sides
    )
