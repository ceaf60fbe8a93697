"""The catalogue of findings, which is a page of the documentation and installed as it is."""

from __future__ import annotations

import re
from pathlib import Path

from .findings import FINDINGS

_INSTALLED = Path(__file__).with_name("catalogue.md")
_IN_CHECKOUT = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"


def explain(name: str) -> str:
    """Return what the catalogue says about a finding.

    Raises:
        ValueError: There is no such finding; the message has those that there are.
    """
    if name not in FINDINGS:
        raise ValueError(f"there is no finding {name!r}; there are {', '.join(FINDINGS)}")
    page = _INSTALLED if _INSTALLED.exists() else _IN_CHECKOUT
    text = page.read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, body = section.partition("\n")
        if title.strip() == name:
            return f"{name}: {FINDINGS[name]}\n\n{body.strip()}"
    raise ValueError(f"{page} says nothing about {name}")
