"""Check files: find destructors and callbacks, walk them, and apply ignore comments."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from clean_exit.lint import callbacks
from clean_exit.lint.evaluator import Bound, Env, Evaluator
from clean_exit.lint.files import CALLBACK_WORDS, Source, Survey, distribution, ignore_comments
from clean_exit.lint.files import survey as survey_files
from clean_exit.lint.findings import BY_CODE, RULES, UNUSED_IGNORE, Finding, Note, Step
from clean_exit.lint.frames import Frame
from clean_exit.lint.project import Project
from clean_exit.lint.scopes import Class, Function, Module, statements
from clean_exit.lint.walk import Walker


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        findings: The findings, sorted by path, line and column.
        notes: The files that could not be read or parsed.
        files: The number of files.
    """

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()
    files: int = 0


def check(
    paths: Iterable[str],
    *,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Result:
    """Check files, and follow their imports within the same project.

    Args:
        paths: Files, as `python_files` yields them.
        select: The rules to check; all by default.
        ignore: The rules to leave out.

    Returns:
        The findings and notes.

    Raises:
        ValueError: A rule does not exist.
    """
    rules, files = selected_rules(select, ignore), list(paths)
    survey = survey_files(files)
    project = Project(files, survey.read)
    by_path: dict[str, list[Finding]] = {path: [] for path in survey.candidates}
    for finding in check_project(project, survey):
        by_path.setdefault(finding.path, []).append(finding)
    visible: list[Finding] = []
    for path, of_file in by_path.items():
        module = project.module(path)
        visible += apply_ignores(of_file, module.source, rules) if module else of_file
    findings = sorted(
        (one for one in visible if one.rule in rules),
        key=lambda one: (one.path, one.line, one.column, one.rule),
    )
    notes = sorted({*survey.notes, *project.notes}, key=lambda note: (note.path, note.line))
    return Result(tuple(findings), tuple(notes), len(files))


def selected_rules(select: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the rules to check.

    Raises:
        ValueError: A rule does not exist; the message lists the rules.
    """
    rules = (*RULES, UNUSED_IGNORE)
    for name in (*select, *ignore):
        if name not in rules:
            raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(rules)}")
    return ({UNUSED_IGNORE} | set(select or RULES)) - set(ignore)


def check_project(project: Project, survey: Survey) -> list[Finding]:
    """Return the findings of all files, before ignore comments are applied."""
    evaluator, found = Evaluator(project), _Findings(project)
    modules = [module for path in survey.candidates if (module := project.module(path))]
    assigned = [one for module in modules for one in _assigned_destructors(evaluator, module)]
    owners = {cls for module in modules for cls in module.classes if "__del__" in cls.members}
    owners |= {cls for cls, _ in assigned}
    names = {(cls.name.encode(), distribution(cls.module.source.path)) for cls in owners}
    below = sorted(survey.files_below(names) - set(survey.candidates))
    inheriting = [module for path in below if (module := project.module(path))]
    walker = Walker(evaluator, found.add_reached)
    todo = list(assigned)
    for module in (*modules, *inheriting):
        with found.noting_deep_nesting(module):
            todo += [(c, one) for c in module.classes for one in _destructors(evaluator, c)]
    todo.sort(key=lambda one: len(evaluator.mro(one[0])[0]))
    for cls, function in todo:
        with found.noting_deep_nesting(cls.module):
            walker.walk_destructor(cls, function)
    for module in modules:
        if any(word in module.source.data for word in CALLBACK_WORDS):
            with found.noting_deep_nesting(module):
                for site, node in callbacks.call_sites(evaluator, module):
                    for rule, look in callbacks.RULES:
                        if message := look(site, node):
                            found.add(rule, node, message, module, ())
    return list(found.by_place.values())


class _Findings:
    """The findings: for each place and rule the one with the shortest trace."""

    def __init__(self, project: Project) -> None:
        self.by_place: dict[tuple[str, str, int, int], Finding] = {}
        self._project = project

    @contextlib.contextmanager
    def noting_deep_nesting(self, module: Module) -> Iterator[None]:
        """Add a note about a file that is nested too deeply, instead of failing."""
        try:
            yield
        except RecursionError:
            message = "not all of it was followed: the code is nested too deeply"
            self._project.notes.append(Note(module.source.path, 0, message))

    def add_reached(self, rule: str, node: ast.AST, message: str, frame: Frame) -> None:
        """Add a finding that a destructor reaches, if its file is one of those to check."""
        if self._project.is_checked(frame.function.module):
            self.add(rule, node, message, frame.function.module, frame.trace)

    def add(
        self, rule: str, node: ast.AST, message: str, module: Module, trace: tuple[Step, ...]
    ) -> None:
        """Add a finding, unless its place has one with a trace that is not longer."""
        source = module.source
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        key = (rule, source.path, line, offset)
        if key in self.by_place and len(self.by_place[key].trace) <= len(trace):
            return
        end = getattr(node, "end_lineno", None) or line
        if hasattr(node, "body") and not isinstance(node, ast.Lambda):
            end = line  # The finding is about the head of a compound statement.
        end_offset = getattr(node, "end_col_offset", 0) or 0
        is_one_line = end == getattr(node, "end_lineno", line) == line
        way = " -> ".join(step.name for step in trace)
        self.by_place[key] = Finding(
            rule,
            source.path,
            line,
            source.column(line, offset),
            f"{way}: {message}" if way else message,
            trace,
            end,
            source.column(line, end_offset) if is_one_line else 0,
            source.line(line),
        )


def _destructors(evaluator: Evaluator, cls: Class) -> list[Function]:
    """Return the destructor of a class: its own or inherited, a method or an assigned function."""
    owner, found = evaluator.member(cls, "__del__") or (cls, None)
    if isinstance(found, Function):
        return [found]
    return _functions(evaluator, found, Env(owner)) if isinstance(found, ast.expr) else []


def _functions(evaluator: Evaluator, node: ast.expr, env: Env) -> list[Function]:
    value = evaluator.evaluate(node, env)
    function = value.function if isinstance(value, Bound) else value
    return [function] if isinstance(function, Function) else []


def _assigned_destructors(evaluator: Evaluator, module: Module) -> list[tuple[Class, Function]]:
    """Return the destructors that ``Class.__del__ = function`` sets outside of the class."""
    found: list[tuple[Class, Function]] = []
    if b".__del__" not in module.source.data:
        return found
    scopes = [(Env(module), module.source.tree.body)]
    scopes += [(Env(function), function.body) for function in module.functions]
    for env, body in scopes:
        for node in statements(body):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and target.attr == "__del__":
                    cls = evaluator.evaluate(target.value, env)
                    if cls is None and isinstance(target.value, ast.Name):
                        cls = _unknown_class(target.value.id, module)
                    if isinstance(cls, Class):
                        functions = _functions(evaluator, node.value, env)  # type: ignore[attr-defined]
                        found += [(cls, one) for one in functions]
    return found


def _unknown_class(name: str, module: Module) -> Class:
    """Return a class with an unknown base, for a name such as a decorator's argument."""
    base: ast.expr = ast.Constant(None)
    return Class(ast.ClassDef(name, [base], [], [], []), module, name)


def apply_ignores(findings: list[Finding], source: Source, rules: set[str]) -> list[Finding]:
    """Return a file's findings without those that its comments hide.

    A comment that hides nothing is a finding, unless its rule was not selected.
    """
    hidden: set[Finding] = set()
    unused = []
    for comment in ignore_comments(source):
        first, last = _statement_at(source, comment.line)
        here = [one for one in findings if first <= one.line <= last]
        for name in [BY_CODE.get(rule, rule) for rule in comment.rules] or [""]:
            matching = {one for one in here if not name or one.rule == name}
            hidden |= matching
            if matching or (name in RULES and name not in rules):
                continue
            message = f"there is no finding{f' of {name}' if name else ''} to ignore on this line"
            if name and name not in RULES:
                message = f"there is no rule {name!r}"
            place = (UNUSED_IGNORE, source.path, comment.line, comment.column, message)
            text = source.line(comment.line)
            unused.append(Finding(*place, code_line=text, end_line=comment.line))
    return [one for one in findings if one not in hidden] + unused


def _statement_at(source: Source, line: int) -> tuple[int, int]:
    """Return the first and last line of the innermost statement on a line.

    For a compound statement, the lines of its head.
    """
    spans = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if node.lineno <= line <= max(last, node.lineno):
                spans.append((node.lineno, max(last, node.lineno)))
    return max(spans, default=(line, line))  # The innermost one begins last.
