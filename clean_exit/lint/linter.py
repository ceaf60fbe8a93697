"""Check files: find destructors and callbacks, walk them, and apply ignore comments."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from clean_exit.lint import callbacks
from clean_exit.lint.evaluator import Bound, Env, Evaluator
from clean_exit.lint.files import (
    CALLBACK_WORDS,
    Source,
    ignore_comments,
    matches,
    survey,
)
from clean_exit.lint.findings import RULES, Finding, Note, Step
from clean_exit.lint.frames import Frame
from clean_exit.lint.project import Project
from clean_exit.lint.scopes import Class, Function, Module
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
    per_file_ignores: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Result:
    """Check files, and follow their imports within the same project.

    Args:
        paths: Files, as `python_files` yields them.
        select: The rules to check; by default those that are not opt-in. "all" means all rules.
        ignore: The rules to leave out.
        per_file_ignores: The rules to leave out in the files that match a glob pattern.

    Returns:
        The findings and notes.

    Raises:
        ValueError: A rule does not exist.
    """
    rules, files = selected_rules(select, ignore), list(paths)
    hidden = {glob: _named(names) for glob, names in per_file_ignores.items()}
    candidates, unread = survey(files)
    project = Project(files, candidates)
    by_path: dict[str, list[Finding]] = {}
    for finding in check_project(project, candidates):
        by_path.setdefault(finding.path, []).append(finding)
    findings: list[Finding] = []
    for path, of_file in sorted(by_path.items()):
        here = rules.difference(*(names for glob, names in hidden.items() if matches(path, [glob])))
        if module := project.module(path):
            of_file = apply_ignores(of_file, module.source)
            of_file = one_for_each_statement([f for f in of_file if f.rule in here], module.source)
        findings += sorted(of_file, key=lambda one: (one.line, one.column, one.rule))
    notes = sorted({*unread, *project.notes}, key=lambda note: (note.path, note.line))
    return Result(tuple(findings), tuple(notes), len(files))


def selected_rules(select: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the rules to check.

    Raises:
        ValueError: A rule does not exist; the message lists the rules.
    """
    chosen = _named(select) or {rule.id for rule in RULES.values() if rule.default}
    return chosen - _named(ignore)


def _named(names: Collection[str]) -> set[str]:
    """Return the rules of these names; "all" means all of them."""
    for name in names:
        if name not in (*RULES, "all"):
            raise ValueError(f"unknown rule {name!r}; choose from {', '.join(RULES)}")
    return set(RULES) if "all" in names else set(names)


def check_project(project: Project, candidates: Iterable[str]) -> list[Finding]:
    """Return the findings of all files, before ignore comments are applied."""
    evaluator, found = Evaluator(project), _Findings(project)
    modules = [module for path in candidates if (module := project.module(path))]
    walker = Walker(evaluator, found.add_reached)
    for cls in (cls for module in modules for cls in module.classes):
        with found.noting_deep_nesting(cls.module):
            function = _destructor(evaluator, cls)
            if function and not callbacks.runs_only_after_exit_callback(evaluator, cls):
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
        way = " -> ".join(step.name for step in trace)
        if trace and trace[0].path != source.path:
            name = trace[0].path.replace(os.sep, "/").rpartition("/")[2]
            way = f"{name}:{trace[0].line}: {way}"
        self.by_place[key] = Finding(
            rule,
            source.path,
            line,
            source.column(line, offset),
            f"{way}: {message}" if way else message,
            trace,
            source.line(line),
        )


def _destructor(evaluator: Evaluator, cls: Class) -> Function | None:
    """Return the destructor of a class: its own or inherited, a method or an assigned function."""
    owner, found = evaluator.member(cls, "__del__") or (cls, None)
    if isinstance(found, ast.expr):
        found = evaluator.evaluate(found, Env(owner))
    function = found.function if isinstance(found, Bound) else found
    return function if isinstance(function, Function) else None


def apply_ignores(findings: list[Finding], source: Source) -> list[Finding]:
    """Return a file's findings without those that its comments hide."""
    hidden: set[Finding] = set()
    for line, rules in ignore_comments(source):
        first, last = _statement_at(source, line)
        here = {one for one in findings if first <= one.line <= last}
        hidden |= {one for one in here if not rules or one.rule in rules}
    return [one for one in findings if one not in hidden]


def one_for_each_statement(findings: list[Finding], source: Source) -> list[Finding]:
    """Return the first rule's finding of each statement: one change of the code ends them all."""
    kept, seen = [], set[object]()
    order = sorted(RULES, key=lambda rule: not RULES[rule].default)
    for one in sorted(findings, key=lambda one: (order.index(one.rule), one.line, one.column)):
        keys: set[object] = {_statement_at(source, one.line)}
        if len(one.trace) > 2:  # One change of the destructor ends all that it reaches below.
            keys.add((one.rule, one.trace[0]))
        if keys.isdisjoint(seen):
            kept.append(one)
            seen |= keys
    return kept


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
