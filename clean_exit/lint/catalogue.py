"""The catalogue of rules, which is a page of the documentation and installed as it is."""

from __future__ import annotations

from clean_exit.catalogue import RULES as CATALOGUE
from clean_exit.lint.findings import RULES, UNUSED


def explain(name: str) -> str:
    """Return what the catalogue says about a rule, by its id or its code.

    Raises:
        ValueError: There is no such rule; the message has those that there are.
    """
    rules = (*RULES.values(), UNUSED)
    by_code = {rule.code: rule.id for rule in rules}
    lines = {rule.id: f"{rule.id} ({rule.code}): {rule.summary}" for rule in rules}
    return CATALOGUE.explain(by_code.get(name, name), lines)
