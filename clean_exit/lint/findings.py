"""The rules, the findings, and notes about files that were not checked."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Rule:
    """A rule: its stable id, its code for flake8, and a summary."""

    id: str
    code: str
    summary: str


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("import", "CEX001", "an import that a destructor reaches"),
        Rule("global", "CEX002", "a global name that may be None"),
        Rule("partial-init", "CEX003", "an attribute that is missing or None if __init__ failed"),
        Rule("blocking-call", "CEX004", "a destructor that may wait forever"),
        Rule("device-call", "CEX005", "a device call or a garbage collection in a destructor"),
        Rule("finalize-keeps-alive", "CEX010", "a finalizer that keeps its own object alive"),
        Rule("async", "CEX012", "a coroutine or an event loop in a destructor"),
    )
}


@dataclass(frozen=True)
class Finding:
    """A place in a file that breaks a rule.

    Attributes:
        rule: The id of the rule.
        path: The file.
        line: The line, from 1.
        column: The column in characters, from 1.
        message: A description in one line.
        trace: The names of the functions from the destructor to the place; empty without one.
        code_line: The source line, without its end.
    """

    rule: str
    path: str
    line: int
    column: int
    message: str
    trace: tuple[str, ...] = ()
    code_line: str = ""

    @property
    def help(self) -> str:
        """The command that explains the rule and how to fix the code."""
        return f"clean-exit-lint --explain {self.rule}"

    def to_json(self) -> dict[str, object]:
        """Return the finding as an entry of the JSON format."""
        shown = {name: value for name, value in vars(self).items() if name != "code_line"}
        return {**shown, "help": self.help}


@dataclass(frozen=True)
class Note:
    """A file or a part of one that was not checked, and the reason."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.message}"
