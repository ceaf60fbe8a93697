"""Passages: nothing is left out, they fit into the model, and cutting takes linear time."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo.reading.formats import read_markdown
from rag_demo.reading.passages import PASSAGE_CHARS, Heading, cut, passages_of
from tests.support.programs import run

PARAGRAPHS = st.lists(
    st.sampled_from(
        [
            "# A",
            "## Port",
            "8443",
            "---",
            "x" * 19,
            "word " * 30,
            "z" * 900,
            "  ",
            "1.",
            "```",
            "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 40,
            "- an item\n" * 30,
            "> quoted",
            "    code",
        ]
    ),
    max_size=12,
)


def marked(text: str) -> list[Heading]:
    """Find headings that begin with #."""
    found = re.finditer(r"^#+ (.+)", text, re.MULTILINE)
    return [Heading(each.start(), each.end(), each[1]) for each in found]


@given(PARAGRAPHS, st.sampled_from([100, PASSAGE_CHARS]), st.sampled_from(["", "#", "markdown"]))
@settings(max_examples=100, deadline=None)
def test_cut_leaves_nothing_out(paragraphs: list[str], size: int, marks: str) -> None:
    text = "\n\n".join(paragraphs)
    tables, headings = None, marked(text) if marks == "#" else []
    if marks == "markdown":
        _, _, _, headings, tables = read_markdown(text.encode())  # type: ignore[assignment]
    passages = list(cut(text, size, 0, headings, tables))
    whole = "".join(text[p.start : p.stop] for p in passages)
    assert "".join(whole.split()) == "".join(text.split())
    assert all(0 < p.stop - p.start <= size - len(p.header) for p in passages)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(passages))


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("8443", [""]),
        ("## Port\n\n8443", ["Port"]),
        ("# Server\n\nA long description of it.\n\n## Port\n\n8443\n\n", ["Server"]),
        ("## Port\n\n8443\n\n## Host\n\nThe name of the host.", ["Port"]),
        ("# One\n\nA first text, not short.\n\n# Two\n\nA second one, longer.", ["One", "Two"]),
    ],
)
def test_heading_begins_a_passage(text: str, headings: list[str]) -> None:
    """A short section is joined to the next, or at the end to the one before."""
    assert [passage.heading for passage in cut(text, headings=marked(text))] == headings


def test_sentences_of_scripts_without_spaces_stay_whole() -> None:
    sentence = "\u5409\u8f29\u306f\u732b\u3067\u3042\u308b\u3002"
    text = sentence * 250
    assert all(text[each.stop - 1] == "\u3002" for each in cut(text, 100))


def test_passages_overlap() -> None:
    text = " ".join(f"Sentence number {n}." for n in range(200))
    found = list(cut(text, 300, 60))
    assert all(0 < a.stop - b.start <= 60 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("chars_per_token", [4.0, 0.5])
def test_passages_fit_into_what_the_model_reads(chars_per_token: float) -> None:
    """A model reads 256 tokens; texts of other scripts have more tokens for each character."""

    def lengths(texts: object) -> list[float]:
        return [len(text) / chars_per_token / 256 for text in texts]  # type: ignore[attr-defined]

    texts = ["short", " ".join(f"Sentence number {n}." for n in range(300)), "z" * 5000]
    found = passages_of(texts, ["", "A title", ""], lengths)
    assert found[0] == []
    for text, spans in zip(texts[1:], found[1:], strict=True):
        assert max(lengths([text[a:b] for a, b in spans])) <= 1
        whole = "".join(text[a:b] for a, b in spans)
        assert "".join(whole.split()) == "".join(text.split())


HOSTILE = """
from rag_demo.reading.formats import read_html, read_markdown
from rag_demo.reading.passages import cut
MARKS = ("a\\n", "|a|b|\\n|-|-|\\n|1|2|\\n", "> ", "```\\n", "- a\\n", "[a\\n", "---\\na:\\n")
for part in (*MARKS, "\\u6f22\\u5b57", "!.?", '."\\')]', "# \\n\\n", "\\n \\t", " ", "#", "word "):
    text = part * (200_000 // len(part))
    _, _, _, headings, tables = read_markdown(text.encode())
    for kind in (tables, None):
        passages = cut(text, headings=headings, tables=kind)
        assert sum(each.stop - each.start for each in passages) <= len(text)
for part in ("<a ", "<a x='", "<!--", "<script>", "<p>", "&#"):
    read_html((part * (200_000 // len(part))).encode())
print("done")
"""


@pytest.mark.slow
def test_hostile_texts_take_linear_time() -> None:
    """Megabytes without spaces, sentences or paragraphs, and tags that are not closed."""
    result = run(HOSTILE)
    assert (result.returncode, result.stdout) == (0, "done\n"), str(result)
