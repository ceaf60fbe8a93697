"""What others wrote cannot drive a terminal."""

from __future__ import annotations

import re
import unicodedata

from rag_demo.printable import on_one_line, printable


def test_nothing_harmful_is_left() -> None:
    """No control character but the line's end and the tab, no change of direction, no half pair."""
    everything = "".join(map(chr, [*range(0x3000), *range(0xD700, 0x10000)]))
    for char in set(printable(everything)) - {"\n", "\t"}:
        assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp"), hex(ord(char))
        assert unicodedata.bidirectional(char) not in ("RLO", "LRO", "RLE", "RLI", "PDF"), char
    assert printable("Zürich 漢字 \U0001f600\n\tx") == "Zürich 漢字 \U0001f600\n\tx"


def test_it_is_written_out() -> None:
    """A reader sees what is there; control: as it is, a terminal would obey it."""
    evil = "\x1b]0;title\x07\x9b31m\rgone\udcff"
    assert on_one_line(f"a  \n b{evil}") == r"a b\x1b]0;title\x07\x9b31m gone\udcff"
    assert re.search("[\x1b\x07\x9b]", evil)
