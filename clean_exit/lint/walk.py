"""Walk a destructor and the functions that it calls, and apply the rules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Union

from clean_exit.lint.construction import Constructions
from clean_exit.lint.evaluator import Bound, Evaluator, Instance, Variables, dotted
from clean_exit.lint.facts import NOTHING, Facts, facts_about, states_of
from clean_exit.lint.files import distribution
from clean_exit.lint.findings import Step
from clean_exit.lint.frames import (
    SHUTDOWN_CHECK,
    Frame,
    branches,
    constants_of,
    is_meta_path,
    is_none_test,
    is_wrapped,
    plain_test,
)
from clean_exit.lint.handlers import caught_names, is_suppress, suppressed_names
from clean_exit.lint.rules import ATTRIBUTES, CALLS, NAMES, STATEMENTS, WITHS, Rules
from clean_exit.lint.scopes import (
    Class,
    Function,
    assignments_in,
    bind_arguments,
    last_name,
)

_MAX_TRACE = 4  # The destructor and three calls; further away, too much depends on the callers.
_MAX_CALLS = 400  # Functions entered for one destructor.
_UNKNOWN = ast.Name("")  # An unknown value.
_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)
Report = Callable[[str, ast.AST, str, Frame], None]


class Walker:
    """Walks destructors one after the other, applies the rules, and reports the findings."""

    def __init__(self, evaluator: Evaluator, report: Report) -> None:
        self._evaluator = evaluator
        self._report = report
        self._constructions = Constructions(evaluator)
        self._seen: dict[object, Facts] = {}

    def walk_destructor(self, cls: Class, function: Function) -> None:
        """Walk the destructor of a class, which may be inherited."""
        self._seen = {}
        step = Step("__del__", function.module.source.path, function.node.lineno)
        receiver, built = Instance(cls, is_self=True), self._constructions.of(cls)
        frame = Frame(self._evaluator, function, receiver, built, cls, (step,), NOTHING)
        frame.constants = constants_of(bind_arguments(function, None, bound=True))
        self._apply(STATEMENTS, frame, function.node)
        if not function.is_async:
            self._run(frame)

    def _apply(self, rules: Rules, frame: Frame, node: ast.AST, *more: object) -> None:
        for rule, look in rules:
            if message := look(frame, node, *more):
                self._report(rule, node, message, frame)

    def _run(self, frame: Frame) -> None:
        if is_wrapped(frame.function):
            frame.facts = frame.facts.catching({"BaseException"})
        stored = frame.function.names
        frame.constants = {k: v for k, v in frame.constants.items() if k not in stored}
        if self._block(frame, frame.function.body):
            frame.ends.append(frame.facts)

    # Statements

    def _block(self, frame: Frame, statements: Sequence[ast.stmt]) -> bool:
        """Walk statements; return whether the code after them is reached."""
        return all(self._statement(frame, statement) for statement in statements)

    def _statement(self, frame: Frame, node: ast.stmt) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return True
        if isinstance(node, (ast.If, ast.While)):
            return self._branch(frame, node)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(frame, node.iter)
            before = frame.facts
            self._block(frame, node.body)
            frame.facts = before.common(frame.facts)
            return self._block(frame, node.orelse)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(frame, node)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(frame, node)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            self._expression(frame, node.subject)
            before = end = frame.facts
            for case in node.cases:
                frame.facts = before
                self._expressions(frame, case.pattern)
                frame.facts = before.plus(self._test(frame, case.guard)[0] or NOTHING)
                if self._block(frame, case.body):
                    end = end.common(frame.facts)
            frame.facts = end
            return True
        if isinstance(node, ast.Assert):
            true, false = self._test(frame, node.test)
            if false is not None:
                self._apply(STATEMENTS, frame, node)
            frame.facts = frame.facts.plus(true or NOTHING)
            return True
        self._apply(STATEMENTS, frame, node)
        if isinstance(node, ast.Raise):
            return False  # What makes the error runs only after a failure.
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                self._expression(frame, node.value)
                for target in targets:
                    self._store(frame, target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._read_target(frame, node.target)
            self._expression(frame, node.value)
            self._store(frame, node.target, _UNKNOWN)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._read_target(frame, target)
        else:
            self._expressions(frame, node)
        if isinstance(node, ast.Return):
            frame.ends.append(frame.facts)
        return not isinstance(node, (ast.Return, ast.Continue, ast.Break))

    def _read_target(self, frame: Frame, target: ast.expr) -> None:
        """Walk a target that must exist already, as in ``x += 1`` and ``del x``."""
        if isinstance(target, ast.Name):
            self._apply(NAMES, frame, target)
        elif name := frame.own_attribute(target):
            self._attribute(frame, target, name)
        else:
            self._expressions(frame, target)

    def _store(self, frame: Frame, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            name = frame.own_attribute(value)
            frame.aliases.pop(target.id, None)
            frame.facts = frame.facts.forgetting(f"({target.id})")
            if isinstance(value, _TESTS) and len(frame.function.names.get(target.id, ())) == 1:
                frame.tests[target.id] = value
            if name:
                frame.aliases[target.id] = name
        elif isinstance(target, (ast.Tuple, ast.List)):
            whole = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            parts = value.elts if whole else [_UNKNOWN] * len(target.elts)  # type: ignore[attr-defined]
            for inner, part in zip(target.elts, parts, strict=True):
                self._store(frame, inner, part)
        elif isinstance(target, ast.Attribute):
            self._expression(frame, target.value)
            if name := frame.own_attribute(target):
                known = frame.facts.states(f"({value.id})") if isinstance(value, ast.Name) else ()
                frame.facts = frame.facts.storing(name, *known, *states_of(value))
                frame.aliases = {k: v for k, v in frame.aliases.items() if v != name}
        else:
            self._expressions(frame, target)

    def _branch(self, frame: Frame, node: ast.If | ast.While) -> bool:
        true, false = self._test(frame, node.test)
        before, ends = frame.facts, []
        if isinstance(node, ast.If):
            frame.conditions.append(node.test)
        if true is not None:
            frame.facts = before.plus(true)
            if self._block(frame, node.body) and isinstance(node, ast.If):
                ends.append(frame.facts)
        if isinstance(node, ast.While):  # The body may not have run at all.
            frame.facts = before.common(frame.facts)
            return self._block(frame, node.orelse)
        if false is not None:
            frame.facts = before.plus(false)
            if self._block(frame, node.orelse):
                ends.append(frame.facts)
        frame.conditions.pop()
        frame.facts = _on_any_way(ends) or before
        return bool(ends)

    def _with(self, frame: Frame, node: ast.With | ast.AsyncWith) -> bool:
        outside = frame.facts.caught
        for item in node.items:
            head = item.context_expr
            self._expression(frame, head)
            value = frame.evaluate(head)
            self._apply(WITHS, frame, head, value)
            if is_suppress(head, value):
                frame.facts = frame.facts.catching(suppressed_names(head))
                continue
            names: tuple[str, ...] = ("__enter__", "__exit__")
            if dotted(value) == "contextlib.closing()" and isinstance(head, ast.Call) and head.args:
                value, names = frame.evaluate(head.args[0]), ("close",)
            if isinstance(value, Instance):
                for name in names:
                    self._follow_member(frame, value, name)
            if item.optional_vars:
                self._store(frame, item.optional_vars, _UNKNOWN)
        reached = self._block(frame, node.body)
        caught = frame.facts.caught != outside
        frame.facts = replace(frame.facts, caught=outside)
        return reached or caught

    def _try(self, frame: Frame, node: ast.Try) -> bool:
        before = frame.facts
        frame.facts = before.catching(n for handler in node.handlers for n in caught_names(handler))
        reached = self._block(frame, node.body)
        frame.facts = replace(frame.facts, caught=before.caught)
        reached = reached and self._block(frame, node.orelse)
        ends = [frame.facts] if reached else []
        for handler in node.handlers:
            frame.facts = before
            self._apply(STATEMENTS, frame, handler)
            if self._block(frame, handler.body):
                ends.append(frame.facts)
        frame.facts = _on_any_way(ends) or before
        final = self._block(frame, node.finalbody)
        return bool(ends) and final

    # Expressions

    def _expressions(self, frame: Frame, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(frame, child)
            elif not isinstance(child, (ast.expr_context, ast.operator)):
                self._expressions(frame, child)

    def _test(self, frame: Frame, node: ast.expr | None) -> tuple[Facts | None, Facts | None]:
        """Walk a test and return its branches.

        A test of a name that may be None is harmless. A test whose result is known is not walked.
        """
        if node is None:
            return NOTHING, NOTHING
        node = plain_test(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._test(frame, node.operand)[::-1]
        both = branches(frame, node)
        if None not in both and not isinstance(node, ast.Name):
            self._expression(frame, node)
        return both

    def _bool_op(self, frame: Frame, node: ast.BoolOp) -> None:
        after_first = None
        for one in node.values:
            true, false = self._test(frame, one)
            after_first = after_first or frame.facts
            goes_on = true if isinstance(node.op, ast.And) else false
            if goes_on is None:
                break
            frame.facts = frame.facts.plus(goes_on)
        frame.facts = after_first or frame.facts

    def _expression(self, frame: Frame, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self._apply(NAMES, frame, node)
        elif isinstance(node, ast.Attribute):
            self._read(frame, node)
        elif isinstance(node, ast.Call):
            self._call(frame, node)
        elif isinstance(node, ast.BoolOp):
            self._bool_op(frame, node)
        elif isinstance(node, ast.IfExp):
            both, before = self._test(frame, node.test), frame.facts
            for facts, one in zip(both, (node.body, node.orelse), strict=True):
                if facts is not None:
                    frame.facts = before.plus(facts)
                    self._expression(frame, one)
            frame.facts = before
        elif isinstance(node, ast.NamedExpr):
            self._expression(frame, node.value)
            self._store(frame, node.target, node.value)
        elif is_none_test(node):
            for side in ast.iter_child_nodes(node):
                if isinstance(side, ast.expr) and not isinstance(side, ast.Name):
                    self._expression(frame, side)
        elif isinstance(node, ast.Lambda):
            self._expressions(frame, node.args)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self._comprehension(frame, node)
        else:
            self._expressions(frame, node)

    def _comprehension(
        self, frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        before, own = None, frame.own_names
        for part in node.generators:
            self._expression(frame, part.iter)
            before = before or frame.facts
            frame.own_names = frame.own_names | {
                n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)
            }
            for test in part.ifs:
                frame.facts = frame.facts.plus(self._test(frame, test)[0] or NOTHING)
        for one in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self._expression(frame, one)
        frame.facts, frame.own_names = before or frame.facts, own

    def _read(self, frame: Frame, node: ast.Attribute) -> None:
        if SHUTDOWN_CHECK.fullmatch(node.attr) or is_meta_path(node):
            return
        self._expression(frame, node.value)
        if name := frame.own_attribute(node):
            self._attribute(frame, node, name)
            return
        value = frame.evaluate(node.value)
        if isinstance(value, Instance):
            found = self._evaluator.method(value.cls, node.attr)
            if found and found.is_property:
                self._follow(frame, found, value, None)

    def _attribute(self, frame: Frame, node: ast.expr, name: str) -> None:
        if method := self._evaluator.method(frame.destroyed, name):
            is_cached = "cached_property" in method.decorators and frame.facts.has(name)
            if method.is_property and not is_cached:
                self._follow(frame, method, frame.object, None)
            return
        self._apply(ATTRIBUTES, frame, node, name)
        frame.facts = frame.facts.plus(facts_about(name, "there"))

    # Calls

    def _call(self, frame: Frame, node: ast.Call) -> None:
        if frame.checks_shutdown(node):
            return
        is_getattr = last_name(node.func) == "getattr"
        if is_getattr and len(node.args) == 2 and (name := frame.own_attribute(node)):
            self._attribute(frame, node, name)
        self._expression(frame, node.func)
        for at, one in enumerate((*node.args, *(keyword.value for keyword in node.keywords))):
            # If the name is None, getattr returns the default.
            if not (isinstance(one, ast.Name) and is_getattr and len(node.args) == 3 and at == 0):
                self._expression(frame, one)
        value = frame.evaluate(node.func)
        self._apply(CALLS, frame, node, value)
        for stored in assignments_in(node, frame.function):  # setattr(self, "name", value)
            frame.facts = frame.facts.storing(stored.name, *states_of(stored.value))
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
        if method := self._evaluator.method(value.cls, name):
            self._follow(frame, method, value, node)

    def _follow(
        self,
        frame: Frame,
        function: Function,
        receiver: Instance | Class | None,
        node: ast.Call | None,
    ) -> None:
        """Walk a function that the frame's function calls."""
        if not self._can_follow(frame, function):
            return
        receiver, variables, constants = _bind_call(frame, function, receiver, node)
        is_self = receiver == frame.object
        reaches = is_self or frame.object in variables.values()
        facts = replace(frame.facts.without_parameters(), present=frozenset())
        if not reaches:
            facts = replace(facts, known=frozenset(), at_start=frozenset())
        key = (function, receiver, facts, tuple(sorted(constants.items(), key=repr)))
        if key not in self._seen:
            self._seen[key] = NOTHING
            bare = is_self and function is self._evaluator.method(frame.destroyed, function.name)
            name = function.name if bare else function.label
            step = Step(name, function.module.source.path, function.node.lineno)
            inner = frame.calling(
                function, receiver, trace=(*frame.trace, step), facts=facts, variables=variables,
                constants=constants,
            )  # fmt: skip
            self._run(inner)
            end = _on_any_way(inner.ends)
            if is_self and end:  # What holds at every return holds after the call.
                self._seen[key] = end.without_parameters()
        end = self._seen[key]
        if end is not NOTHING:
            own = {one for one in frame.facts.known if one[0][0] == "("}
            frame.facts = replace(
                frame.facts,
                known=end.known | own,
                at_start=end.at_start,
            )

    def _can_follow(self, frame: Frame, function: Function) -> bool:
        here, there = frame.function.module.source.path, function.module.source.path
        line = function.node.lineno
        return not (
            function.is_async
            or len(frame.trace) >= _MAX_TRACE
            or len(self._seen) > _MAX_CALLS
            or (here != there and distribution(here) != distribution(there))
            or any(step.line == line and step.path == there for step in frame.trace)
        )


def _on_any_way(ends: Iterable[Facts]) -> Facts | None:
    """Return what holds on all of the ways; None if there are no ways."""
    common = None
    for end in ends:
        common = common.common(end) if common else end
    return common


_Binding = tuple[Union[Instance, Class, None], Variables, dict[str, object]]  # noqa: UP007


def _bind_call(
    frame: Frame, function: Function, receiver: Instance | Class | None, node: ast.Call | None
) -> _Binding:
    """Return the receiver, variables and constants that a call passes on."""
    variables = dict(frame.variables)
    if frame.function.self_name and frame.receiver:
        variables[frame.function, frame.function.self_name] = frame.receiver
    arguments = bind_arguments(function, node, bound=receiver is not None)
    constants = constants_of(arguments)
    for name, argument in arguments.items():
        if isinstance(argument, ast.Name) and argument.id in frame.constants:
            constants[name] = frame.constants[argument.id]
        elif name not in constants and (value := frame.evaluate(argument)):
            variables[function, name] = value
    if receiver is None and function.self_name in arguments:
        first = variables.get((function, function.self_name or ""))
        receiver = first if isinstance(first, Instance) else None
    return receiver, variables, constants
