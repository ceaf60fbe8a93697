"""The catalogues of findings and rules: pages beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent


class Catalogue(NamedTuple):
    """A page with a section for each thing that a command reports.

    Attributes:
        command: The command that reports them, and prints a section with ``--explain``.
        kind: What they are: findings, or rules.
        page: The file, in this package.
    """

    command: str
    kind: str
    page: str

    def sections(self) -> dict[str, str]:
        """Return the text of each section, by its heading."""
        page = (_HERE / self.page).read_text(encoding="utf-8")
        parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
        return {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2])}  # noqa: B905

    def explain(self, name: str, known: Mapping[str, str]) -> str:
        """Return the line about a name, and its section.

        Args:
            name: A finding or rule.
            known: The names that exist, with a line about each.

        Raises:
            ValueError: There is no such name; the message lists those that exist, and names the
                other command if that knows it.
        """
        if name in known:
            return f"{known[name]}\n\n{self.sections()[name]}"
        for other in (FINDINGS, RULES):
            if other is not self and name in other.sections():
                found = f"{name!r} is a {other.kind} of {other.command}"
                raise ValueError(f"{found}: {other.command} --explain {name}")
        raise ValueError(
            f"there is no {self.kind} {name!r}; the {self.kind}s are {', '.join(known)}"
        )


FINDINGS = Catalogue("clean-exit", "finding", "catalogue.md")
RULES = Catalogue("clean-exit-lint", "rule", "lint-catalogue.md")
