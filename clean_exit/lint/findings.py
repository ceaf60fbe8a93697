"""The rules, and the findings: a rule, a place, and the way there from the destructor."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Rule:
    """A rule: its stable id, its code for flake8, and a summary.

    Rules that are not `default` are opt-in: they need ``--select``. Their findings are true, but
    few of them matter in a program that closes its resources.
    """

    id: str
    code: str
    summary: str
    default: bool = True


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("import", "CEX001", "an import that a destructor reaches"),
        Rule("global", "CEX002", "a global name that may be None at exit", False),
        Rule("partial-init", "CEX003", "an attribute that is missing if __init__ failed"),
        Rule("blocking-call", "CEX004", "a destructor that may wait forever"),
        Rule("device-call", "CEX005", "a device call or a garbage collection in a destructor"),
        Rule("log", "CEX006", "logging or printing in a destructor", False),
        Rule("raise", "CEX007", "an exception that no code can catch"),
        Rule("register", "CEX008", "a destructor that starts work or registers a callback"),
        Rule(
            "explicit-call", "CEX009", "an explicit call of __del__, which then runs twice", False
        ),
        Rule("finalize-keeps-alive", "CEX010", "a finalizer that keeps its own object alive"),
        Rule("atexit-keeps-alive", "CEX011", "an exit callback that keeps an object alive"),
        Rule("async", "CEX012", "a coroutine in a destructor, which nothing awaits"),
        Rule("bare-except", "CEX013", "a handler that catches every exception", False),
        Rule("signature", "CEX014", "a destructor that raises whenever it is called"),
    )
}


@dataclass(frozen=True)
class Step:
    """One function on the way from a destructor to a finding."""

    name: str
    path: str
    line: int


@dataclass(frozen=True)
class Finding:
    """A place in a file that breaks a rule.

    Attributes:
        rule: The id of the rule.
        path: The file.
        line: The line, from 1.
        column: The column in characters, from 1.
        message: A description in one line.
        trace: The functions from the destructor to the place; empty without a destructor.
        code_line: The source line, without its end.
    """

    rule: str
    path: str
    line: int
    column: int
    message: str
    trace: tuple[Step, ...] = ()
    code_line: str = ""

    @property
    def help(self) -> str:
        """The command that explains the rule and how to fix the code."""
        return f"clean-exit-lint --explain {self.rule}"

    @property
    def code(self) -> str:
        """The code of the rule for flake8."""
        return RULES[self.rule].code

    def to_json(self) -> dict[str, object]:
        """Return the finding as an entry of the JSON format."""
        return {
            "rule": self.rule,
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "trace": [step.name for step in self.trace],
            "help": self.help,
        }


@dataclass(frozen=True)
class Note:
    """A file or a part of one that was not checked, and the reason."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.message}"
