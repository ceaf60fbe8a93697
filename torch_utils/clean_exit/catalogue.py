"""The catalogue of findings, which is a page of the documentation and installed as it is."""

from __future__ import annotations

from .. import _catalogue
from .findings import FINDINGS


def explain(name: str) -> str:
    """Return what the catalogue says about a finding.

    Raises:
        ValueError: There is no such finding; the message has those that there are.
    """
    lines = {one: f"{one}: {summary}" for one, summary in FINDINGS.items()}
    return _catalogue.FINDINGS.explain(name, lines)
