"""Walk a destructor and the functions that it calls, and apply the rules to each node."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

from clean_exit.lint.construction import Construction
from clean_exit.lint.evaluator import Bound, Evaluator, Instance, dotted
from clean_exit.lint.files import distribution
from clean_exit.lint.findings import Step
from clean_exit.lint.frames import SHUTDOWN_CHECK, Frame
from clean_exit.lint.handlers import caught_names, is_suppress, suppressed_names
from clean_exit.lint.rules import ATTRIBUTES, CALLS, NAMES, STATEMENTS, WITHS, Rules
from clean_exit.lint.scopes import Class, Function

_MAX_TRACE = 3  # The destructor and two calls; further away, too much depends on the callers.
# These decorators do not catch exceptions; any other one may.
_HARMLESS = {"staticmethod", "classmethod", "property", "override", "final"}
_Facts = frozenset[str]
_NOTHING: _Facts = frozenset()
Report = Callable[[str, ast.AST, str, Frame], None]


class Walker:
    """Walks destructors one after the other, applies the rules, and reports the findings.

    It follows the statements in order. What a test shows holds in its branch, and after it if the
    other branch leaves the function.
    """

    def __init__(self, evaluator: Evaluator, report: Report) -> None:
        self._evaluator = evaluator
        self._report = report
        self._seen: set[object] = set()

    def walk_destructor(self, cls: Class, function: Function) -> None:
        """Walk the destructor of a class, which may be inherited."""
        self._seen = set()
        step = Step("__del__", function.module.source.path, function.node.lineno)
        receiver, built = Instance(cls, is_self=True), Construction(self._evaluator, cls)
        frame = Frame(self._evaluator, function, receiver, built, cls, (step,))
        frame = frame.calling(function, receiver, None)
        self._apply(STATEMENTS, frame, function.node)
        if not function.is_async:
            self._run(frame)

    def _apply(self, rules: Rules, frame: Frame, node: ast.AST, *more: object) -> None:
        for rule, look in rules:
            if message := look(frame, node, *more):
                self._report(rule, node, message, frame)

    def _run(self, frame: Frame) -> None:
        """Walk a function; a decorator may catch every exception."""
        if not _HARMLESS.issuperset(frame.function.decorators):
            frame.caught |= {"BaseException"}
        self._block(frame, frame.function.body)

    # Statements

    def _block(self, frame: Frame, statements: Sequence[ast.stmt]) -> bool:
        """Walk statements; return whether the code after them is reached."""
        return all(self._statement(frame, statement) for statement in statements)

    def _blocks(
        self, frame: Frame, ways: Iterable[tuple[_Facts | None, Sequence[ast.stmt]]]
    ) -> bool:
        """Walk one of several blocks; after them, what holds at the end of each of them holds."""
        before, ends = frame.facts, []
        for facts, body in ways:
            if facts is not None:
                frame.facts = before | facts
                if self._block(frame, body):
                    ends.append(frame.facts)
        frame.facts = frozenset.intersection(*ends) if ends else before
        return bool(ends)

    def _statement(self, frame: Frame, node: ast.stmt) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return True
        if isinstance(node, ast.If):
            true, false = self._test(frame, node.test)
            frame.conditions += 1
            reached = self._blocks(frame, [(true, node.body), (false, node.orelse)])
            frame.conditions -= 1
            return reached
        if isinstance(node, (ast.While, ast.For, ast.AsyncFor)):
            entered: _Facts | None = _NOTHING
            if isinstance(node, ast.While):
                entered, _ = self._test(frame, node.test)
            else:
                self._expression(frame, node.iter)
            self._blocks(frame, [(entered, node.body), (_NOTHING, [])])
            return self._block(frame, node.orelse)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(frame, node)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(frame, node)  # type: ignore[arg-type]
        if isinstance(node, ast.Match):
            self._expression(frame, node.subject)
            self._blocks(frame, [*((_NOTHING, case.body) for case in node.cases), (_NOTHING, [])])
            return True
        self._apply(STATEMENTS, frame, node)
        if isinstance(node, ast.Raise):
            return False  # What makes the error runs only after a failure.
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (node.value, *targets) if node.value is not None else ():
                self._expression(frame, one)
        else:
            self._expressions(frame, node)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._apply(NAMES, frame, node.target)
        return not isinstance(node, (ast.Return, ast.Continue, ast.Break))

    def _with(self, frame: Frame, node: ast.With | ast.AsyncWith) -> bool:
        outside = frame.caught
        for item in node.items:
            head = item.context_expr
            self._expression(frame, head)
            value = frame.evaluate(head)
            self._apply(WITHS, frame, head, value)
            if is_suppress(head, value):
                frame.caught |= suppressed_names(head)
                continue
            names: tuple[str, ...] = ("__enter__", "__exit__")
            if dotted(value) == "contextlib.closing()" and isinstance(head, ast.Call) and head.args:
                value, names = frame.evaluate(head.args[0]), ("close",)
            if isinstance(value, Instance):
                for name in names:
                    if method := self._evaluator.method(value.cls, name):
                        self._follow(frame, method, value, None)
        reached = self._block(frame, node.body)
        caught, frame.caught = frame.caught, outside
        return reached or caught != outside

    def _try(self, frame: Frame, node: ast.Try) -> bool:
        before, outside = frame.facts, frame.caught
        frame.caught = outside.union(*map(caught_names, node.handlers))
        reached = self._block(frame, node.body)
        frame.caught = outside
        ends = [frame.facts] if reached and self._block(frame, node.orelse) else []
        for handler in node.handlers:
            frame.facts = before
            self._apply(STATEMENTS, frame, handler)
            if self._block(frame, handler.body):
                ends.append(frame.facts)
        frame.facts = frozenset.intersection(*ends) if ends else before
        return self._block(frame, node.finalbody) and bool(ends)

    # Expressions

    def _expressions(self, frame: Frame, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(frame, child)
            elif not isinstance(child, (ast.expr_context, ast.operator)):
                self._expressions(frame, child)

    def _test(self, frame: Frame, node: ast.expr) -> tuple[_Facts | None, _Facts | None]:
        """Walk a test; return what holds if it is true and if it is false.

        A test of a name that may be None is harmless. A test whose result is known is not walked.
        """
        both = frame.shown(node, True), frame.shown(node, False)
        bare = node.operand if isinstance(node, ast.UnaryOp) else node
        bare = bare.left if isinstance(bare, ast.Compare) else bare
        if None not in both and not isinstance(bare, ast.Name):
            self._expression(frame, node)
        return both

    def _expression(self, frame: Frame, node: ast.expr) -> None:
        before = frame.facts
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Store):
                self._apply(NAMES, frame, node)
        elif isinstance(node, ast.Attribute):
            self._read(frame, node)
        elif isinstance(node, ast.Call):
            self._call(frame, node)
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                goes_on = self._test(frame, one)[0 if isinstance(node.op, ast.And) else 1]
                if goes_on is None:
                    break
                frame.facts |= goes_on
            frame.facts = before
        elif isinstance(node, ast.IfExp):
            for facts, one in zip(
                self._test(frame, node.test), (node.body, node.orelse), strict=True
            ):
                if facts is not None:
                    frame.facts = before | facts
                    self._expression(frame, one)
            frame.facts = before
        elif isinstance(node, ast.Lambda):
            self._expressions(frame, node.args)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):  # As in hasattr(self, "name").
                frame.used.add(node.value)
        else:
            self._expressions(frame, node)

    def _read(self, frame: Frame, node: ast.Attribute) -> None:
        if SHUTDOWN_CHECK.fullmatch(node.attr) or ast.unparse(node).endswith("sys.meta_path"):
            return
        self._expression(frame, node.value)
        name = frame.own_attribute(node)
        if name and isinstance(node.ctx, ast.Store):
            frame.stored.add(name)
        elif name:
            self._attribute(frame, node, name)

    def _attribute(self, frame: Frame, node: ast.expr, name: str) -> None:
        if method := self._evaluator.method(frame.destroyed, name):
            if method.is_property:
                self._follow(frame, method, frame.object, None)
            return
        self._apply(ATTRIBUTES, frame, node, name)
        frame.used.add(name)

    # Calls

    def _call(self, frame: Frame, node: ast.Call) -> None:
        if frame.checks_shutdown(node):
            return
        self._expressions(frame, node)
        value = frame.evaluate(node.func)
        self._apply(CALLS, frame, node, value)
        if isinstance(value, Function):
            self._follow(frame, value, None, node)
        elif isinstance(value, Bound):
            self._follow(frame, value.function, value.receiver, node)

    def _follow(
        self,
        frame: Frame,
        function: Function,
        receiver: Instance | Class | None,
        node: ast.Call | None,
    ) -> None:
        """Walk a function that the frame's function calls."""
        path, line = function.module.source.path, function.node.lineno
        here = frame.function.module.source.path
        if (
            function.is_async
            or len(frame.trace) >= _MAX_TRACE
            or (here != path and distribution(here) != distribution(path))
            or any(step.line == line and step.path == path for step in frame.trace)
        ):
            return
        inner = frame.calling(function, receiver, node)
        key = (function, inner.receiver, inner.facts, inner.caught, repr(inner.constants))
        if key not in self._seen:
            self._seen.add(key)
            is_self = inner.receiver == frame.object
            bare = is_self and function is self._evaluator.method(frame.destroyed, function.name)
            name = function.name if bare else function.label
            inner.trace = (*frame.trace, Step(name, path, line))
            self._run(inner)
