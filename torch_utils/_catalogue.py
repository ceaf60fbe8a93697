"""Pages of the documentation that are installed too, and printed section by section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent


class Catalogue(NamedTuple):
    """A page with a section for each thing that a command reports.

    Attributes:
        command: What reports them, and prints a section with ``--explain``.
        kind: What they are: findings, or rules.
        wing: The folder of this package where the page is installed.
        page: Its file below docs, in a checkout.
    """

    command: str
    kind: str
    wing: str
    page: str

    def sections(self) -> dict[str, str]:
        """Return what the page says, by the name of what it is about."""
        installed = _HERE / self.wing / "catalogue.md"
        page = installed if installed.exists() else _HERE.parent / "docs" / self.page
        parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2])}  # noqa: B905

    def explain(self, name: str, known: Mapping[str, str]) -> str:
        """Return the line about a name, and what the page says.

        Args:
            name: What was asked for.
            known: The names that there are, with a line about each.

        Raises:
            ValueError: There is no such name; the message has those that there are, and the
                other command, if that knows it.
        """
        if name in known:
            return f"{known[name]}\n\n{self.sections()[name]}"
        for other in (FINDINGS, RULES):
            if other is not self and name in other.sections():
                said = f"{name!r} is a {other.kind} of {other.command}"
                raise ValueError(f"{said}: {other.command} --explain {name}")
        raise ValueError(f"there is no {self.kind} {name!r}; there are {', '.join(known)}")


FINDINGS = Catalogue("clean-exit", "finding", "clean_exit", "catalogue.md")
RULES = Catalogue("clean-exit-lint", "rule", "clean_exit_lint", "lint-catalogue.md")
