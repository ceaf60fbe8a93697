"""Check files: parse those with destructors or finalizers, apply the rules and ignore comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from clean_exit.lint.classes import Module, destructible_classes
from clean_exit.lint.files import Source, matches, parse
from clean_exit.lint.findings import RULES, Finding, Note
from clean_exit.lint.rules import RULES_FOR_CLASSES, find_kept_objects

_IGNORE = re.compile(r"#.*\bclean-exit-lint\s*:\s*ignore\b\s*(?:\[([^\]]*)\])?")


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
    """Check files, each one alone.

    Args:
        paths: Files, as `python_files` yields them.
        select: The rules to check; by default, and with "all", all rules.
        ignore: The rules to leave out.
        per_file_ignores: The rules to leave out in the files that match a glob pattern.

    Returns:
        The findings and notes.

    Raises:
        ValueError: A rule does not exist.
    """
    rules, files = selected_rules(select, ignore), list(paths)
    hidden = {glob: _named(names) for glob, names in per_file_ignores.items()}
    findings: list[Finding] = []
    notes: list[Note] = []
    for path in sorted(files):
        here = rules.difference(*(names for glob, names in hidden.items() if matches(path, [glob])))
        try:
            data = Path(path).read_bytes()
            # Parsing takes ten times as long as reading.
            if b"__del__" in data or (b"finalize" in data and b"weakref" in data):
                source = parse(path, data)
                found = [one for one in check_source(source) if one.rule in here]
                findings += apply_ignores(found, source)
        except OSError as error:
            notes.append(Note(path, 0, f"not read: {error.strerror or error}"))
        except SyntaxError as error:
            notes.append(Note(path, error.lineno or 0, f"not parsed: {error.msg}"))
        except (RecursionError, MemoryError):
            notes.append(Note(path, 0, "not parsed: the code is nested too deeply"))
    return Result(tuple(findings), tuple(notes), len(files))


def selected_rules(select: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the rules to check.

    Raises:
        ValueError: A rule does not exist; the message lists the rules.
    """
    return (_named(select) or set(RULES)) - _named(ignore)


def _named(names: Collection[str]) -> set[str]:
    """Return the rules of these names; "all" means all of them."""
    for name in names:
        if name not in (*RULES, "all"):
            raise ValueError(f"unknown rule {name!r}; choose from {', '.join(RULES)}")
    return set(RULES) if "all" in names else set(names)


def check_source(source: Source) -> list[Finding]:
    """Return all findings of a file in the order of the source, one for each rule and place."""
    module = Module(source.tree)
    found: dict[tuple[str, int, int], Finding] = {}

    def add(rule: str, node: ast.AST, message: str, trace: tuple[str, ...]) -> None:
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        key = (rule, line, offset)
        if key not in found or len(found[key].trace) > len(trace):
            text = f"{' -> '.join(trace)}: {message}" if trace else message
            column = source.column(line, offset)
            found[key] = Finding(rule, source.path, line, column, text, trace, source.line(line))

    for cls in destructible_classes(module):
        for rule, find in RULES_FOR_CLASSES.items():
            for visit, message in find(cls):
                names = tuple(function.name for function in visit.trace)
                add(rule, visit.node, message, names or ("__del__",))
    for node, message in find_kept_objects(module):
        add("finalize-keeps-alive", node, message, ())
    return sorted(found.values(), key=lambda one: (one.line, one.column, one.rule))


def apply_ignores(findings: list[Finding], source: Source) -> list[Finding]:
    """Return a file's findings without those that its comments hide."""
    hidden: set[Finding] = set()
    for number, text in enumerate(source.lines, start=1):
        if match := _IGNORE.search(text):
            rules = re.findall(r"[\w-]+", match[1] or "") or RULES
            first, last = _statement_at(source, number)
            hidden |= {f for f in findings if first <= f.line <= last and f.rule in rules}
    return [one for one in findings if one not in hidden]


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
