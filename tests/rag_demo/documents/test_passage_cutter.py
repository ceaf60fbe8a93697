"""Unit tests of the passage cutter (private): completeness and linear time."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo.documents.passages import PASSAGE_CHARS, SHORTEST, cut, passages_of
from support.programs import assert_clean, run

PARAGRAPHS = st.lists(
    st.sampled_from(
        ["# A", "## Port", "8443", "---", "x" * 19, "word " * 30, "z" * 900, "  ", "1."]
    ),
    max_size=12,
)


@given(PARAGRAPHS, st.sampled_from([100, PASSAGE_CHARS]))
@settings(max_examples=300, deadline=None)
def test_cut_leaves_nothing_out(paragraphs: list[str], size: int) -> None:
    """Every character is in a passage; only a whole text may be short; no passage is too long."""
    text = "\n\n".join(paragraphs)
    passages = list(cut(text, size))
    assert "".join("".join(p.text.split()) for p in passages) == "".join(text.split())
    assert "".join("".join(text[p.start : p.stop].split()) for p in passages) == "".join(
        text.split()
    )
    assert len(passages) == 1 or all(len(p.text) >= SHORTEST for p in passages)
    assert all(len(p.text) <= size + 2 * SHORTEST + 4 for p in passages)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(passages))


FENCED = "## Start\n\nA first program:\n\n```\nx = 1\n\n# a comment\n\ny = 2\n```\n\n## End"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8443", [("8443", "")]),
        ("## Port\n\n8443", [("## Port\n\n8443", "Port")]),
        (
            "# Server\n\nA long description of it.\n\n## Port\n\n8443\n\n",
            [("# Server\n\nA long description of it.\n\n## Port\n\n8443", "Server")],
        ),
        (
            "## Port\n\n8443\n\n## Host\n\nThe name of the host.",
            [("## Port\n\n8443\n\n## Host\n\nThe name of the host.", "Port")],
        ),
        (FENCED, [(FENCED, "Start")]),
        (
            "Start\n=====\n\nA first text, not short.\n\nThe next\n--------\n\nA second one.",
            [
                ("Start\n=====\n\nA first text, not short.", "Start"),
                ("The next\n--------\n\nA second one.", "The next"),
            ],
        ),
    ],
)
def test_cut_joins_short_sections(text: str, found: list[tuple[str, str]]) -> None:
    """To the next section, or at the end to the previous one; the first heading stays."""
    assert [(passage.text, passage.heading) for passage in cut(text)] == found


def test_cut_counts_wide_characters_as_four() -> None:
    """Sentences of these scripts end without a space."""
    sentence = "\u5409\u8f29\u306f\u732b\u3067\u3042\u308b\u3002"
    found = list(cut(sentence * 250))
    assert "".join(passage.text for passage in found) == sentence * 250
    assert {len(passage.text) for passage in found[:-1]} == {200}
    assert len(passages_of(sentence * 30)) == 0 < len(passages_of(sentence * 40))


HOSTILE = """
from rag_demo.documents.passages import cut
for part in ("\\u6f22\\u5b57", "!.?", '."\\')]', "# \\n\\n", "\\n \\t", "a\\n", " ", "#"):
    text = part * (600_000 // len(part))
    assert sum(len(passage.text) for passage in cut(text)) <= 2 * len(text)
print("done")
"""


@pytest.mark.slow
def test_cut_takes_linear_time() -> None:
    """For megabytes without spaces, sentences or paragraphs, and of nothing else."""
    result = run(HOSTILE)
    assert_clean(result)
    assert result.stdout == "done\n"


@pytest.mark.slow
def test_cut_takes_the_memory_of_a_paragraph() -> None:
    for text in ("\u6f22\u5b57" * 50_000, "!.? " * 20_000, "# Heading\n\nword\n\n" * 5_000):
        tracemalloc.start()
        for _ in cut(text):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(text) + 100_000


@pytest.mark.slow
def test_cut_joins_many_paragraphs_in_linear_time() -> None:
    (passage,) = cut("a\n\n" * 100_000, 10**8)
    assert passage.text == "\n\n".join("a" * 100_000)
