"""Read files, and say which destructors cannot work."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from clean_exit.lint.discover import SITES, Survey, survey
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.findings import RULES, UNUSED_IGNORE, Finding, Note, Step
from clean_exit.lint.frames import Frame
from clean_exit.lint.project import Project
from clean_exit.lint.rules import AllRules, atexit_keeps_alive, explicit_call, finalize_keeps_alive
from clean_exit.lint.scopes import Class, Function, Module, lambda_of, statements
from clean_exit.lint.sites import calls
from clean_exit.lint.source import Source, ignores
from clean_exit.lint.values import Bound, Env
from clean_exit.lint.walk import Walker

_SITE_RULES = (explicit_call, finalize_keeps_alive, atexit_keeps_alive)


@dataclass(frozen=True)
class Result:
    """What was found, in the order of the files, and what could not be read."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()
    files: int = 0


@dataclass
class _Collector:
    """Keeps one finding a place: the one with the shortest way there."""

    found: dict[tuple[str, str, int, int], Finding] = field(default_factory=dict)

    def add(
        self, rule: str, node: ast.AST, what: str, source: Source, trace: tuple[Step, ...]
    ) -> None:
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        key = (rule, source.path, line, offset)
        if key in self.found and len(self.found[key].trace) <= len(trace):
            return
        end = getattr(node, "end_lineno", None) or line
        if hasattr(node, "body") and not isinstance(node, ast.Lambda):
            end = line  # Of a compound statement, its first line is what is meant.
        way = " -> ".join(step.name for step in trace)
        end_offset = getattr(node, "end_col_offset", 0) or 0
        self.found[key] = Finding(
            rule,
            source.path,
            line,
            source.column(line, offset),
            f"{way}: {what}" if way else what,
            trace,
            end,
            source.column(line, end_offset)
            if end == getattr(node, "end_lineno", line) == line
            else 0,
            source.line(line),
        )

    def reached(self, rule: str, node: ast.AST, what: str, frame: Frame) -> None:
        self.add(rule, node, what, frame.function.module.source, frame.trace)

    def at_site(self, rule: str, node: ast.AST, what: str, module: Module) -> None:
        self.add(rule, node, what, module.source, ())


def check(
    paths: Iterable[str],
    *,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Result:
    """Check files; what one of them imports is followed into the others, and no further.

    Args:
        paths: Files, as `discover.python_files` yields them.
        select: The rules to check; all, if none is named.
        ignore: Rules not to check.
    """
    files = list(paths)
    seen = survey(files)
    project = Project(files, seen.read)
    found = check_project(project, seen)
    rules = chosen(select, ignore)
    findings = sorted(
        _unignored(found, project, seen.telling, rules),
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
    collector = _Collector()
    evaluator = Evaluator(project)
    modules = [module for path in seen.telling if (module := project.module(path))]
    owners = {
        (cls.name.encode(), module.source.path)
        for module in modules
        for cls in module.classes
        if _has_destructor(cls)
    }
    assigned = [one for module in modules for one in _assigned_destructors(evaluator, module)]
    owners |= {(cls.name.encode(), cls.module.source.path) for cls, _ in assigned}
    below = sorted(seen.below(owners) - set(seen.telling))
    heirs = [module for path in below if (module := project.module(path))]
    walker = Walker(evaluator, AllRules(), collector.reached)
    todo = [(cls, function) for module in (*modules, *heirs) for cls in module.classes
            for function in _destructors(evaluator, cls)] + assigned  # fmt: skip
    todo.sort(key=lambda one: len(evaluator.linear(one[0])[0]))
    for cls, function in todo:
        _guarded(project, cls.module, lambda c=cls, f=function: walker.destructor(c, f))  # type: ignore[misc]
    for module in modules:
        if any(word in module.source.data for word in SITES):
            _guarded(project, module, lambda m=module: _visit_sites(evaluator, m, collector))  # type: ignore[misc]
    return list(collector.found.values())


def _visit_sites(evaluator: Evaluator, module: Module, collector: _Collector) -> None:
    for site, node in calls(evaluator, module, collector.at_site):
        for rule in _SITE_RULES:
            rule.on_site(site, node)


def _guarded(project: Project, module: Module, action: Callable[[], None]) -> None:
    try:
        action()
    except RecursionError:
        note = Note(module.source.path, 0, "not all of it was followed: it is nested too deeply")
        project.notes.append(note)


def _has_destructor(cls: Class) -> bool:
    return "__del__" in cls.members or "__del__" in cls.values


def _destructors(evaluator: Evaluator, cls: Class) -> list[Function]:
    """Return a class's destructor, its own or inherited, defined or assigned in its body."""
    found = evaluator.member(cls, "__del__")
    if found is None:
        return []
    if isinstance(found[1], Function):
        return [found[1]]
    if isinstance(found[1], ast.expr):
        return _functions(evaluator, found[1], Env(found[0]))
    return []


def _functions(evaluator: Evaluator, node: ast.expr, env: Env) -> list[Function]:
    if isinstance(node, ast.Lambda):
        return [lambda_of(node, env.scope)]
    values = evaluator.evaluate(node, env)
    functions = [value.function if isinstance(value, Bound) else value for value in values]
    return [one for one in functions if isinstance(one, Function)]


def _assigned_destructors(evaluator: Evaluator, module: Module) -> list[tuple[Class, Function]]:
    """Return what ``Class.__del__ = function`` makes a destructor, outside of the class."""
    found: list[tuple[Class, Function]] = []
    if b".__del__" not in module.source.data:
        return found
    scopes = [(module, module.source.tree), *((one, one.node) for one in module.functions)]
    for scope, top in scopes:
        for node in statements(top.body if isinstance(top.body, list) else ()):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "__del__":
                    env = Env(scope)  # type: ignore[arg-type]
                    values = evaluator.evaluate(target.value, env)
                    classes = [one for one in values if isinstance(one, Class)]
                    if not values and isinstance(target.value, ast.Name):
                        classes = [_unknown_class(target.value.id, module)]
                    found += [(cls, one) for one in _functions(evaluator, node.value, env)
                              for cls in classes]  # fmt: skip
    return found


def _unknown_class(name: str, module: Module) -> Class:
    """Return a class of which nothing is known, as a decorator's argument."""
    base: ast.expr = ast.Constant(None)
    return Class(ast.ClassDef(name, [base], [], [], []), module, name, None)


def _unignored(
    findings: list[Finding], project: Project, telling: Iterable[str], rules: set[str]
) -> list[Finding]:
    """Leave out what comments hide, and add the comments that hide nothing."""
    kept: list[Finding] = []
    by_path: dict[str, list[Finding]] = {}
    for finding in findings:
        by_path.setdefault(finding.path, []).append(finding)
    for path in {*by_path, *telling}:
        module = project.module(path)
        of_file = by_path.get(path, [])
        kept += hide(of_file, module.source, rules) if module else of_file
    return [one for one in kept if one.rule in rules]


def hide(findings: list[Finding], source: Source, rules: set[str]) -> list[Finding]:
    """Return a file's findings without those that its comments hide.

    A comment is of use if it hides anything, be that of a rule that is not asked for.
    """
    hidden: set[Finding] = set()
    unused = []
    for comment in ignores(source):
        here = [one for one in findings if one.line <= comment.line <= max(one.end_line, one.line)]
        names = comment.rules or ("",)
        for name in names:
            matching = {one for one in here if not name or one.rule == name}
            hidden |= matching
            if matching or (name and name in RULES and name not in rules):
                continue
            what = f"nothing of {name} to ignore" if name else "nothing to ignore"
            what += " on this line"
            if name and name not in RULES:
                what = f"there is no rule {name!r}"
            unused.append(
                Finding(
                    UNUSED_IGNORE,
                    source.path,
                    comment.line,
                    comment.column,
                    what,
                    code_line=source.line(comment.line),
                    end_line=comment.line,
                )
            )
    return [one for one in findings if one not in hidden] + unused
