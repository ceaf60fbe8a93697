"""The catalogue of rules, which is a page of the documentation and installed as it is."""

from __future__ import annotations

import re
from pathlib import Path

from .findings import RULES

_INSTALLED = Path(__file__).with_name("catalogue.md")
_IN_CHECKOUT = Path(__file__).resolve().parents[2] / "docs" / "lint-catalogue.md"


def explain(name: str) -> str:
    """Return what the catalogue says about a rule, by its id or its code.

    Raises:
        ValueError: There is no such rule; the message has those that there are.
    """
    by_code = {rule.code: rule.id for rule in RULES.values()}
    rule = RULES.get(by_code.get(name, name))
    if rule is None:
        raise ValueError(f"there is no rule {name!r}; there are {', '.join(RULES)}")
    page = _INSTALLED if _INSTALLED.exists() else _IN_CHECKOUT
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, body = section.partition("\n")
        if title.strip() == rule.id:
            return f"{rule.id} ({rule.code}): {rule.summary}\n\n{body.strip()}"
    raise ValueError(f"{page} says nothing about {rule.id}")
