"""Texts from documents cannot control a terminal."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from support.rag_command import Terminal, succeed, write_lines

# Everything below the CJK characters, half pairs, private characters and the last of the plane.
EVERYTHING = "".join(map(chr, [*range(0x3000), *range(0xD700, 0x10000)]))


@pytest.mark.slow
@pytest.mark.parametrize("stdout", [io.TextIOWrapper, Terminal])
def test_control_characters_are_escaped(
    stdout: Any, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # A table is in bold otherwise.
    parts = [EVERYTHING[start : start + 60] for start in range(0, len(EVERYTHING), 60)]
    records = [{"text": f"words {part}"} for part in parts]
    source = write_lines(tmp_path / "c.jsonl", [*records, {"text": "Zürich 漢字 \U0001f600"}])
    succeed("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    command: list[str | Path] = ["search", tmp_path / "i", "words", "--top-k", "1000"]
    printed = succeed(*command, stdout=stdout)
    assert len(set(printed) & set(EVERYTHING)) > 15_000
    for char in set(printed) - {"\n", "\t"}:
        assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp"), hex(ord(char))
        assert unicodedata.bidirectional(char) not in ("RLO", "LRO", "RLE", "RLI", "PDF"), char
    if stdout is not Terminal:
        assert "Zürich 漢字 \U0001f600" in printed
        assert r"\x1b" in printed and r"\x9b" in printed
