"""Findings for people: each with its line and a caret; and for GitHub's annotations."""

from __future__ import annotations

from collections import Counter

from clean_exit.lint.findings import Finding, printable
from clean_exit.lint.lint import Result

_RED, _BOLD, _DIM, _OFF = "\033[31m", "\033[1m", "\033[2m", "\033[0m"
_WIDEST = 160


def to_text(result: Result, *, color: bool = False) -> str:
    """Write findings for people, with a summary in the last line."""
    lines = []
    for finding in result.findings:
        lines += [*_lines(finding, color), ""]
    return "\n".join([*lines, summary(result)])


def summary(result: Result) -> str:
    """Say in one line what was found."""
    if not result.findings:
        return f"clean-exit-lint: nothing found in {_many(result.files, 'file')}"
    kinds = Counter(finding.rule for finding in result.findings)
    named = ", ".join(f"{count} {rule}" for rule, count in sorted(kinds.items()))
    total = _many(len(result.findings), "finding")
    return f"clean-exit-lint: {total} in {_many(result.files, 'file')}: {named}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _lines(finding: Finding, color: bool) -> list[str]:
    place = f"{printable(finding.path)}:{finding.line}:{finding.column}"
    rule, dim, off = (_RED + finding.rule + _OFF, _DIM, _OFF) if color else (finding.rule, "", "")
    head = f"{_BOLD}{place}{_OFF}" if color else place
    lines = [f"{head}: {rule}: {finding.message}"]
    if finding.code_line.strip():
        lines += ["  | " + text for text in _caret(finding)]
    lines.append(f"  {dim}see {finding.help}{off}")
    return lines


def _caret(finding: Finding) -> list[str]:
    """Return the source line and, below it, what is meant; both without the indentation."""
    code = finding.code_line
    indent = len(code) - len(code.lstrip())
    start = max(finding.column - 1, indent)
    stop = finding.end_column - 1 if finding.end_column > finding.column else start + 1
    shown = code[indent:].rstrip()[:_WIDEST]
    # A tab below a tab is as wide.
    before = "".join("\t" if char == "\t" else " " for char in code[indent:start])
    if len(before) >= _WIDEST:
        return [shown]
    return [shown, before + "^" * max(1, min(stop, len(code.rstrip())) - start)]


def to_github(result: Result) -> str:
    """Write findings as annotations, which GitHub Actions shows beside the code."""
    return "\n".join(map(_annotation, result.findings))


def _annotation(one: Finding) -> str:
    title = _property(f"clean-exit-lint: {one.rule}")
    place = f"file={_property(one.path)},line={one.line},col={one.column}"
    return f"::error {place},title={title}::{_data(f'{one.message} (see {one.help})')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
