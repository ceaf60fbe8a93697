"""What is found: a place, the rule that it breaks, and the way there from the destructor."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1
UNUSED_IGNORE = "unused-ignore"


@dataclass(frozen=True)
class Rule:
    """One rule: its stable id, its code for flake8, and what it is about, in a line."""

    id: str
    code: str
    summary: str


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("import", "CEX001", "an import that a destructor reaches"),
        Rule("global", "CEX002", "a module's name that may be None when a destructor needs it"),
        Rule("half-built", "CEX003", "an attribute that is missing where __init__ failed"),
        Rule("wait", "CEX004", "a destructor that may wait for ever"),
        Rule("device", "CEX005", "a call of a device, or a garbage collection, in a destructor"),
        Rule("log", "CEX006", "logging or printing in a destructor"),
        Rule("raise", "CEX007", "an exception that nobody can catch"),
        Rule("register", "CEX008", "a destructor that starts or registers something"),
        Rule("explicit-call", "CEX009", "a call of __del__ by hand: it runs twice"),
        Rule("finalize-keeps-alive", "CEX010", "a finalizer that keeps its own object alive"),
        Rule("atexit-keeps-alive", "CEX011", "an exit callback that keeps an object alive"),
        Rule("async", "CEX012", "a coroutine in a destructor: nothing awaits it"),
        Rule("bare-except", "CEX013", "a handler in a destructor that swallows everything"),
    )
}
# Not a rule that can be broken by code: what an ignore comment is told that hides nothing.
UNUSED = Rule(UNUSED_IGNORE, "CEX099", "an ignore comment that hides no finding")


BY_CODE = {rule.code: rule.id for rule in (*RULES.values(), UNUSED)}


def printable(path: str) -> str:
    """Return a path in one line, with escapes for what a terminal would not show."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in path
    )


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
        line: From 1.
        column: In characters, from 1.
        end_line: The last line of what was found; an ignore comment may stand on any of them.
        trace: The functions from the destructor to the place; empty where none is involved.
        code_line: The source line, without its end.
    """

    rule: str
    path: str
    line: int
    column: int
    message: str
    trace: tuple[Step, ...] = ()
    end_line: int = 0
    end_column: int = 0
    code_line: str = ""

    @property
    def help(self) -> str:
        """How to read what is wrong and how to mend it."""
        return f"clean-exit-lint --explain {self.rule}"

    @property
    def code(self) -> str:
        """The code of the rule, as flake8 has them."""
        return RULES.get(self.rule, UNUSED).code

    def to_json(self) -> dict[str, object]:
        """Return what the JSON format says of it."""
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
    """Something that was not read, and why; not a finding."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        path = printable(self.path)
        where = f"{path}:{self.line}" if self.line else path
        return f"{where}: {self.message}"
