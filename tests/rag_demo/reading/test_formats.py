"""What becomes of a file: headings, main text, encodings, and pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_demo import Document, RagDemoError
from rag_demo.reading.sources import Reading, Skipped, read_source
from tests.support.pdf import pdf_of

LONG = "A text that is long enough for a section of its own."


def read(folder: Path, name: str, content: str | bytes, **options: Any) -> list[Document]:
    """Read a file of a folder with other files of the test."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_source(str(path), Skipped(), Reading(**options)))


def titles(documents: list[Document]) -> list[str]:
    return [each.metadata.get("title", "") for each in documents]


@pytest.mark.parametrize(
    "matter",
    [
        '---\ntitle: "Real"\ntags: [a, b]\n...\n',
        "---\r\ntitle: 'Real'\r\n---\r\n",
        '+++\ntitle = "Real"\n+++\n',
    ],
)
def test_front_matter_gives_the_title_and_no_text(tmp_path: Path, matter: str) -> None:
    end = matter.replace("\r\n", "\n")
    (first, second) = read(tmp_path, "a.md", f"{matter}{LONG}\n\n## Next\n\n{LONG}")
    assert (first.text, first.metadata["title"]) == (LONG, "Real")
    assert (first.metadata["line"], first.metadata["start"]) == (end.count("\n") + 1, len(end))
    assert second.metadata["title"] == "Next"


def test_two_rules_are_not_front_matter(tmp_path: Path) -> None:
    (document,) = read(tmp_path, "a.md", f"---\n\n{LONG}\n\n---\n\nmore: words")
    assert "more: words" in document.text and LONG in document.text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"# One\n\n- an item of a list, no heading\n---\n\n{LONG}", ["One"]),
        (f"# One\n\n{LONG}\n\n<!--\n# Hidden\n\nnot shown to anyone\n-->\n", ["One"]),
        (f"# One\n\n{LONG}\n\n````\n```\n# code\n```\n# more code\n````\n", ["One"]),
        (f"# One\n\n{LONG}\n\n> # quoted, and not a section of this text\n", ["One"]),
        (f"# One\n\n{LONG}\n\nTwo\n---\n\n{LONG}", ["One", "Two"]),
        (f"# One\n\n{LONG}\n\n  ## Two ##\n\n{LONG}", ["One", "Two"]),
    ],
)
def test_headings_of_markdown_are_those_of_commonmark(
    tmp_path: Path, text: str, found: list[str]
) -> None:
    assert titles(read(tmp_path, "a.md", text)) == found


def test_headings_of_restructured_text_are_underlined(tmp_path: Path) -> None:
    text = f"One\n===\n\n{LONG}\n\n# no heading\n\n{LONG}\n\nTwo\n~~~\n\n{LONG}"
    assert titles(read(tmp_path, "a.rst", text)) == ["One", "Two"]


def test_comments_in_cells_of_code_are_not_headings(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": f"# One\n\n{LONG}"},
        {"cell_type": "code", "source": [f"# load the data\nx = 1  # {LONG}\n"]},
        {"cell_type": "markdown", "source": f"# Two\n\n{LONG}"},
    ]
    found = read(tmp_path, "a.ipynb", json.dumps({"cells": cells}))
    assert titles(found) == ["One", "Two"]
    assert [each.metadata["cell"] for each in found] == [1, 3]


PAGE = f"""<html><head><title>Site</title><style>p {{color: red}}</style></head><body>
<nav><a href="/">Home</a> | <a href="/about">About</a> | <a href="/contact">Contact</a></nav>
<div><a href="/">Home</a> | <a href="/about">About</a> | <a href="/contact">Contact</a></div>
<h1>Caches</h1><p>{LONG}</p><script>var hidden = 1</script>
<h2>Port &amp; host</h2><p>The port is 8443.</p><ul><li>one item</li><li>two items</li></ul>
<pre>def f():
    return 1</pre><table><tr><td>left</td><td>right</td></tr></table>
<footer>Copyright of somebody</footer></body></html>"""


def test_main_text_of_a_page_is_read_with_its_headings(tmp_path: Path) -> None:
    found = read(tmp_path, "a.html", PAGE)
    assert titles(found) == ["Caches", "Port & host"]
    text = "\n".join(each.text for each in found)
    shown = ("8443", "one item", "two items", "    return 1", "left", "right", LONG)
    assert all(part in text for part in shown), text
    assert not any(part in text for part in ("Home", "Contact", "hidden", "color", "Copyright"))


@pytest.mark.parametrize("page", ["short<br>words", "<h1>short</h1>words"])
def test_short_pages_are_read(tmp_path: Path, page: str) -> None:
    (document,) = read(tmp_path, "a.html", page)
    assert {"short", "words"} <= set(document.text.split())


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "caf\u00e9 \u201cquoted\u201d"),
        ("Shift_JIS", "shift_jis", "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002"),
        ("utf-16", "utf-8", "caf\u00e9"),
        ("no-such-encoding", "utf-8", "caf\u00e9"),
    ],
)
def test_declared_encoding_of_a_page_counts(
    tmp_path: Path, declared: str, encoding: str, text: str
) -> None:
    for form in (
        f'<meta charset="{declared}">',
        f"<?xml version='1.0' encoding='{declared}'?>",
        f'<meta http-equiv="Content-Type" content="text/html; charset={declared}">',
    ):
        page = f"{form}<html><body><p>{text}</p></body></html>".encode(encoding)
        (document,) = read(tmp_path, "a.html", page)
        assert document.text == text, form


@pytest.mark.parametrize(
    "content",
    [b"\r\n# A\r\n\r\nwords\r\n", b"\xef\xbb\xbf# A\n\nwords\n", "# A\n\nwords".encode("utf-16")],
)
def test_marks_and_line_ends_are_those_of_any_system(tmp_path: Path, content: bytes) -> None:
    (document,) = read(tmp_path, "a.md", content)
    assert (document.text, document.metadata["title"]) == ("# A\n\nwords", "A")


def test_pages_of_a_pdf_are_named_and_divided_words_joined(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="the extra pdf is not installed")
    content = pdf_of("The em-\nployee reads.", "The second page.", "The third page.")
    (document,) = read(tmp_path, "a.pdf", content)
    assert "employee" in document.text
    assert (document.metadata["page"], document.metadata["last_page"]) == (1, 3)
    (first, *_) = read(tmp_path, "b.pdf", pdf_of(f"{LONG} " * 3, LONG), chunk_size=100)
    assert first.metadata["page"] == 1 and "last_page" not in first.metadata
    with pytest.raises(RagDemoError, match=r"c\.pdf: "):
        read(tmp_path, "c.pdf", b"%PDF-1.4 damaged")
