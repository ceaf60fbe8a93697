"""The catalogue of rules, which is a page of the documentation and installed as it is."""

from __future__ import annotations

from .. import _catalogue
from .findings import RULES


def explain(name: str) -> str:
    """Return what the catalogue says about a rule, by its id or its code.

    Raises:
        ValueError: There is no such rule; the message has those that there are.
    """
    by_code = {rule.code: rule.id for rule in RULES.values()}
    lines = {rule.id: f"{rule.id} ({rule.code}): {rule.summary}" for rule in RULES.values()}
    return _catalogue.RULES.explain(by_code.get(name, name), lines)
