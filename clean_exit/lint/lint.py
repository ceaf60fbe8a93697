"""Read files, and say which destructors cannot work."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from clean_exit.lint.discover import SITE_WORDS, Survey, distribution, survey
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.findings import BY_CODE, RULES, UNUSED_IGNORE, Finding, Note, Step
from clean_exit.lint.frames import Frame
from clean_exit.lint.project import Project
from clean_exit.lint.rules import SITES
from clean_exit.lint.scopes import Class, Function, Module, lambda_of, statements
from clean_exit.lint.sites import calls
from clean_exit.lint.source import Source, ignores
from clean_exit.lint.values import Bound, Env
from clean_exit.lint.walk import Walker


@dataclass(frozen=True)
class Result:
    """What was found, in the order of the files, and what could not be read."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()
    files: int = 0


def check(
    paths: Iterable[str],
    *,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Result:
    """Check files; what one of them imports from its own project is followed.

    Args:
        paths: Files, as `discover.python_files` yields them.
        select: The rules to check; all, if none is named.
        ignore: Rules not to check.

    Raises:
        ValueError: There is no such rule.
    """
    rules, files = chosen(select, ignore), list(paths)
    seen = survey(files)
    project = Project(files, seen.read)
    found = check_project(project, seen)
    by_path: dict[str, list[Finding]] = {path: [] for path in seen.telling}
    for finding in found:
        by_path.setdefault(finding.path, []).append(finding)
    kept: list[Finding] = []
    for path, of_file in by_path.items():
        module = project.module(path)
        kept += hide(of_file, module.source, rules) if module else of_file
    findings = sorted(
        (one for one in kept if one.rule in rules),
        key=lambda one: (one.path, one.line, one.column, one.rule),
    )
    notes = sorted({*seen.notes, *project.notes}, key=lambda note: (note.path, note.line))
    return Result(tuple(findings), tuple(notes), len(files))


def chosen(select: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the rules to check.

    Raises:
        ValueError: There is no such rule; the message has those that there are.
    """
    rules = (*RULES, UNUSED_IGNORE)
    for name in (*select, *ignore):
        if name not in rules:
            raise ValueError(f"there is no rule {name!r}; there are {', '.join(rules)}")
    return ({UNUSED_IGNORE} | set(select or RULES)) - set(ignore)


def check_project(project: Project, seen: Survey) -> list[Finding]:
    """Return the findings of all files, whatever comments say."""
    evaluator, found = Evaluator(project), _Findings(project)
    modules = [module for path in seen.telling if (module := project.module(path))]
    assigned = [one for module in modules for one in _assigned_destructors(evaluator, module)]
    owners = {cls for module in modules for cls in module.classes if "__del__" in cls.members}
    owners |= {cls for cls, _ in assigned}
    names = {(cls.name.encode(), distribution(cls.module.source.path)) for cls in owners}
    below = sorted(seen.files_below(names) - set(seen.telling))
    heirs = [module for path in below if (module := project.module(path))]
    walker = Walker(evaluator, found.reached)
    todo = list(assigned)
    for module in (*modules, *heirs):
        with found.guarded(module):
            todo += [(c, one) for c in module.classes for one in _destructors(evaluator, c)]
    todo.sort(key=lambda one: len(evaluator.linear(one[0])[0]))
    for cls, function in todo:
        with found.guarded(cls.module):
            walker.destructor(cls, function)
    for module in modules:
        if any(word in module.source.data for word in SITE_WORDS):
            with found.guarded(module):
                found.visit_sites(evaluator, module)
    return list(found.by_place.values())


class _Findings:
    """Keeps one finding a place: the one with the shortest way there."""

    def __init__(self, project: Project) -> None:
        self.by_place: dict[tuple[str, str, int, int], Finding] = {}
        self._project = project

    @contextlib.contextmanager
    def guarded(self, module: Module) -> Iterator[None]:
        """Note that a file was too much, rather than fail."""
        try:
            yield
        except RecursionError:
            what = "not all of it was followed: it is nested too deeply"
            self._project.notes.append(Note(module.source.path, 0, what))

    def visit_sites(self, evaluator: Evaluator, module: Module) -> None:
        for site, node in calls(evaluator, module):
            for rule, look in SITES:
                if what := look(site, node):
                    self._add(rule, node, what, module, ())

    def reached(self, rule: str, node: ast.AST, what: str, frame: Frame) -> None:
        if self._project.is_given(frame.function.module):
            self._add(rule, node, what, frame.function.module, frame.trace)

    def _add(
        self, rule: str, node: ast.AST, what: str, module: Module, trace: tuple[Step, ...]
    ) -> None:
        source = module.source
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        key = (rule, source.path, line, offset)
        if key in self.by_place and len(self.by_place[key].trace) <= len(trace):
            return
        end = getattr(node, "end_lineno", None) or line
        if hasattr(node, "body") and not isinstance(node, ast.Lambda):
            end = line  # Of a compound statement, its first line is what is meant.
        end_offset = getattr(node, "end_col_offset", 0) or 0
        is_one_line = end == getattr(node, "end_lineno", line) == line
        way = " -> ".join(step.name for step in trace)
        self.by_place[key] = Finding(
            rule,
            source.path,
            line,
            source.column(line, offset),
            f"{way}: {what}" if way else what,
            trace,
            end,
            source.column(line, end_offset) if is_one_line else 0,
            source.line(line),
        )


def _destructors(evaluator: Evaluator, cls: Class) -> list[Function]:
    """Return a class's destructor, its own or inherited, defined or assigned in its body."""
    owner, found = evaluator.member(cls, "__del__") or (cls, None)
    if isinstance(found, Function):
        return [found]
    return _functions(evaluator, found, Env(owner)) if isinstance(found, ast.expr) else []


def _functions(evaluator: Evaluator, node: ast.expr, env: Env) -> list[Function]:
    if isinstance(node, ast.Lambda):
        return [lambda_of(node, env.scope)]
    value = evaluator.evaluate(node, env)
    function = value.function if isinstance(value, Bound) else value
    return [function] if isinstance(function, Function) else []


def _assigned_destructors(evaluator: Evaluator, module: Module) -> list[tuple[Class, Function]]:
    """Return what ``Class.__del__ = function`` makes a destructor, outside of the class."""
    found: list[tuple[Class, Function]] = []
    if b".__del__" not in module.source.data:
        return found
    scopes = [(Env(module), module.source.tree.body)]
    scopes += [(Env(function), function.body) for function in module.functions]
    for env, body in scopes:
        for node in statements(body):
            for target in getattr(node, "targets", ()):
                if isinstance(target, ast.Attribute) and target.attr == "__del__":
                    cls = evaluator.evaluate(target.value, env)
                    if cls is None and isinstance(target.value, ast.Name):
                        cls = _unknown_class(target.value.id, module)
                    if isinstance(cls, Class) and isinstance(node, ast.Assign):
                        functions = _functions(evaluator, node.value, env)
                        found += [(cls, one) for one in functions]
    return found


def _unknown_class(name: str, module: Module) -> Class:
    """Return a class of which nothing is known, as a decorator's argument."""
    base: ast.expr = ast.Constant(None)
    return Class(ast.ClassDef(name, [base], [], [], []), module, name)


def hide(findings: list[Finding], source: Source, rules: set[str]) -> list[Finding]:
    """Return a file's findings without those that its comments hide.

    A comment that hides nothing is a finding, unless its rule was not selected.
    """
    hidden: set[Finding] = set()
    unused = []
    for comment in ignores(source):
        first, last = _statement_at(source, comment.line)
        here = [one for one in findings if first <= one.line <= last]
        for name in [BY_CODE.get(rule, rule) for rule in comment.rules] or [""]:
            matching = {one for one in here if not name or one.rule == name}
            hidden |= matching
            if matching or (name in RULES and name not in rules):
                continue
            what = "nothing to ignore on this line"
            if name:
                what = f"nothing of {name} to ignore on this line"
            if name and name not in RULES:
                what = f"there is no rule {name!r}"
            place = (UNUSED_IGNORE, source.path, comment.line, comment.column, what)
            text = source.line(comment.line)
            unused.append(Finding(*place, code_line=text, end_line=comment.line))
    return [one for one in findings if one not in hidden] + unused


def _statement_at(source: Source, line: int) -> tuple[int, int]:
    """Return the first and the last line of the innermost statement on a line.

    Of one with a body, its head is meant.
    """
    spans = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if node.lineno <= line <= max(last, node.lineno):
                spans.append((node.lineno, max(last, node.lineno)))
    return max(spans, default=(line, line))  # The innermost one begins last.
