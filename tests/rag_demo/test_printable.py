"""Texts from documents cannot control a terminal."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from support.rag_command import succeed, write_lines

# Everything below the CJK characters, half pairs, private characters and the last of the plane.
EVERYTHING = "".join(map(chr, [*range(0x3000), *range(0xD700, 0x10000)]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "table"])
def test_control_characters_are_escaped(layout: str, tmp_path: Path, tiny_model: Path) -> None:
    parts = [EVERYTHING[start : start + 60] for start in range(0, len(EVERYTHING), 60)]
    records = [{"text": f"words {part}"} for part in parts]
    source = write_lines(tmp_path / "c.jsonl", [*records, {"text": "Zürich 漢字 \U0001f600"}])
    succeed("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    printed = succeed("search", tmp_path / "i", "words", "--top-k", "1000", "--format", layout)
    assert len(set(printed) & set(EVERYTHING)) > 15_000
    for char in set(printed) - {"\n", "\t"}:
        assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp"), hex(ord(char))
        assert unicodedata.bidirectional(char) not in ("RLO", "LRO", "RLE", "RLI", "PDF"), char
    if layout == "plain":
        assert "Zürich 漢字 \U0001f600" in printed
        assert r"\x1b" in printed and r"\x9b" in printed
