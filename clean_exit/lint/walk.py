"""Goes the way of a destructor: through its statements, in order, with what is known at each."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from clean_exit.lint.arguments import constant_defaults
from clean_exit.lint.catching import caught_by, is_suppress, suppressed
from clean_exit.lint.construction import Constructions
from clean_exit.lint.decorators import unwrap
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.expressions import Expressions, Report, Rules
from clean_exit.lint.facts import Facts, Tests
from clean_exit.lint.findings import Step
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Class, Function, bound_names
from clean_exit.lint.values import External, Instance

_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)


class Walker(Expressions):
    """Walks destructors, one after the other, and shows the rules what it comes by."""

    def __init__(self, evaluator: Evaluator, rules: Rules, report: Report) -> None:
        super().__init__(evaluator, rules, report)
        self._constructions = Constructions(evaluator)

    def destructor(self, cls: Class, function: Function, name: str = "__del__") -> None:
        """Walk a class's destructor, which may be inherited."""
        self._seen = {}
        step = Step(name, function.module.source.path, function.node.lineno)
        frame = Frame(
            self.evaluator,
            function,
            Instance(cls, is_self=True),
            self._constructions.of(cls),
            cls,
            (step,),
            Facts(),
            constants=constant_defaults(function),
        )
        self._rules.on_statement(self, frame, function.node)
        if not function.is_async:
            self._run(frame)

    def _run(self, frame: Frame) -> None:
        for wrapper in unwrap(frame):
            self._follow_wrapper(frame, wrapper)
        stored = set(bound_names(frame.function.node))
        frame.constants = {k: v for k, v in frame.constants.items() if k not in stored}
        if self._block(frame, frame.function.body):
            frame.ends.append(frame.facts)

    def _follow_wrapper(self, frame: Frame, wrapper: Function) -> None:
        """Walk what a decorator of the project puts around a method."""
        facts, given = frame.facts, frame.given
        if wrapper.parameters and frame.receiver:
            frame.given = {**given, (wrapper, wrapper.parameters[0]): (frame.receiver,)}
        self._follow(frame, wrapper, None, None)
        frame.facts, frame.given = facts, given

    # Statements

    def _block(self, frame: Frame, statements: Sequence[ast.stmt]) -> bool:
        """Walk statements; return whether what follows them is reached."""
        return all(self._statement(frame, statement) for statement in statements)

    def _statement(self, frame: Frame, node: ast.stmt) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return True
        if isinstance(node, ast.If):
            return self._if(frame, node)
        if isinstance(node, ast.While):
            return self._while(frame, node)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(frame, node.iter)
            before = frame.facts
            self._block(frame, node.body)
            frame.facts = before
            return self._block(frame, node.orelse)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(frame, node)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(frame, node)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            return self._match(frame, node)
        if isinstance(node, ast.Assert) and frame.decide(node.test):
            return True
        self._rules.on_statement(self, frame, node)
        if isinstance(node, ast.Raise):  # What it raises is looked up, but fails either way.
            saved, frame.quiet = frame.quiet, True
            self._expressions(frame, node)
            frame.quiet = saved
            return False
        self._simple(frame, node)
        if isinstance(node, ast.Return):
            frame.ends.append(frame.facts)
        return not isinstance(node, (ast.Return, ast.Continue, ast.Break))

    def _simple(self, frame: Frame, node: ast.stmt) -> None:
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._expression(frame, node.value)
                self._store(frame, node.target, node.value)
        elif isinstance(node, ast.Assign):
            self._expression(frame, node.value)
            for target in node.targets:
                self._store(frame, target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._read_target(frame, node.target)
            self._expression(frame, node.value)
        elif isinstance(node, ast.Assert):
            self._test(frame, node.test)
            frame.facts = frame.facts.plus(Tests(frame).split(node.test)[0])
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._read_target(frame, target)
        else:
            self._expressions(frame, node)

    def _read_target(self, frame: Frame, target: ast.expr) -> None:
        """Walk a target that has to be there already, as in ``x += 1`` and ``del x``."""
        if isinstance(target, ast.Name):
            self._rules.on_name(self, frame, target)
        elif name := frame.own_attribute(target):
            self._attribute(frame, target, name)
        else:
            self._expressions(frame, target)

    def _store(self, frame: Frame, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            name = frame.own_attribute(value)
            frame.aliases.pop(target.id, None)
            if isinstance(value, _TESTS) and frame.is_bound_once(target.id):
                frame.tests[target.id] = value
            if name:
                frame.aliases[target.id] = name
        elif isinstance(target, (ast.Tuple, ast.List)):
            whole = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            parts = value.elts if whole else [ast.Constant(0)] * len(target.elts)  # type: ignore[attr-defined]
            for inner, part in zip(target.elts, parts, strict=True):
                self._store(frame, inner, part)
        elif isinstance(target, ast.Attribute):
            self._expression(frame, target.value)
            if name := frame.own_attribute(target):
                frame.facts = frame.facts.storing(name, value)
        elif not isinstance(target, ast.Starred):
            self._expressions(frame, target)

    def _if(self, frame: Frame, node: ast.If) -> bool:
        decided = frame.decide(node.test)
        if decided is not None:
            return self._block(frame, node.body if decided else node.orelse)
        self._test(frame, node.test)
        true, false = Tests(frame).split(node.test)
        frame.note_test(node.test)
        before = frame.facts
        frame.conditions.append(node.test)
        frame.facts = before.plus(true)
        first, after_first = self._block(frame, node.body), frame.facts
        frame.facts = before.plus(false)
        second, after_second = self._block(frame, node.orelse), frame.facts
        frame.conditions.pop()
        if first and second:
            frame.facts = after_first.common(after_second)
        elif first or second:
            frame.facts = after_first if first else after_second
        return first or second

    def _while(self, frame: Frame, node: ast.While) -> bool:
        if frame.decide(node.test) is not False:
            self._test(frame, node.test)
            before = frame.facts
            frame.facts = before.plus(Tests(frame).split(node.test)[0])
            self._block(frame, node.body)
            frame.facts = before
        return self._block(frame, node.orelse)

    def _match(self, frame: Frame, node: ast.Match) -> bool:
        self._expression(frame, node.subject)
        before = frame.facts
        for case in node.cases:
            frame.facts = before
            for below in ast.walk(case.pattern):
                if isinstance(below, (ast.MatchValue, ast.MatchClass)):
                    self._expressions(frame, below)
            if case.guard is not None:
                self._test(frame, case.guard)
                frame.facts = frame.facts.plus(Tests(frame).split(case.guard)[0])
            self._block(frame, case.body)
        frame.facts = before
        return True

    def _with(self, frame: Frame, node: ast.With | ast.AsyncWith) -> bool:
        outside = frame.facts.caught
        for item in node.items:
            self._expression(frame, item.context_expr)
            values = frame.evaluate(item.context_expr)
            self._rules.on_with(self, frame, item.context_expr, values)
            if is_suppress(item.context_expr, values):
                frame.facts = frame.facts.catching(suppressed(item.context_expr))
                continue
            names: tuple[str, ...] = ("__enter__", "__exit__")
            made = item.context_expr
            if External("contextlib.closing()") in values and isinstance(made, ast.Call):
                values = tuple(v for one in made.args[:1] for v in frame.evaluate(one))
                names = ("close",)
            for value in values:
                if isinstance(value, Instance):
                    for name in names:
                        self._follow_member(frame, value, name)
        reached = self._block(frame, node.body)
        caught = frame.facts.caught != outside
        frame.facts = replace(frame.facts, caught=outside)
        return reached or caught

    def _try(self, frame: Frame, node: ast.Try) -> bool:
        before = frame.facts
        names = {name for handler in node.handlers for name in caught_by(handler)}
        frame.facts = before.catching(names)
        reached = self._block(frame, node.body)
        frame.facts = replace(frame.facts, caught=before.caught)
        reached = reached and self._block(frame, node.orelse)
        ends = [frame.facts] if reached else []
        for handler in node.handlers:
            frame.facts = before
            self._rules.on_statement(self, frame, handler)
            if self._block(frame, handler.body):
                ends.append(frame.facts)
        after = ends[0] if ends else before
        for end in ends[1:]:
            after = after.common(end)
        frame.facts = after if ends else before
        final = self._block(frame, node.finalbody)
        return bool(ends) and final
