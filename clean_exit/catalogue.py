"""The catalogues of findings and rules, which are pages in this package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent


class Catalogue(NamedTuple):
    """A page with a section for each finding or rule.

    Attributes:
        kind: "finding" or "rule".
        page: The file in this package.
    """

    kind: str
    page: str

    def sections(self) -> dict[str, str]:
        """Return the text of each section by its heading."""
        page = (_HERE / self.page).read_text(encoding="utf-8")
        parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
        return {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2])}  # noqa: B905

    def explain(self, name: str, known: Mapping[str, str]) -> str:
        """Return a summary and the section of a finding or rule.

        Args:
            name: The finding or rule.
            known: The summary of each existing finding or rule.

        Raises:
            ValueError: The name does not exist. The message lists the names.
        """
        if name in known:
            return f"{known[name]}\n\n{self.sections()[name]}"
        raise ValueError(f"unknown {self.kind} {name!r}; choose from {', '.join(known)}")


FINDINGS = Catalogue("finding", "catalogue.md")
RULES = Catalogue("rule", "lint-catalogue.md")
