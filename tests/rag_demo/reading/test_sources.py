"""`read_source`: which files are read, what is skipped, and what becomes of a file."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rag_demo import Document, RagDemoError
from rag_demo.reading.sources import Reading, Skipped, read_source
from tests.support.pdf import pdf_of


def read(source: Path | str, **options: Any) -> tuple[dict[str, Document], str]:
    """Return the documents by id, and what was skipped."""
    skipped = Skipped()
    found = {each.id: each for each in read_source(str(source), skipped, Reading(**options))}
    return found, str(skipped)


def read_file(folder: Path, name: str, content: str | bytes, **options: Any) -> list[Document]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read(path, **options)[0].values())


def names(folder: Path, **options: Any) -> set[str]:
    return {each.metadata["source"] for each in read(folder, **options)[0].values()}


def test_files_of_known_types_are_read(tmp_path: Path) -> None:
    """Subfolders too; hidden files, caches, links to folders and saved indexes are not."""
    known = {"README", "a.md", "b.markdown", "c.txt", "d.py", "e.rst", "f.HTML", "deep/g.txt"}
    for name in (*known, ".hidden.txt", ".git/a.txt", "node_modules/a.txt", "x.png", "index/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"words of {name}")
    (tmp_path / "index" / "rag-demo-1.sqlite").write_text("")
    (tmp_path / "round").symlink_to(tmp_path)
    found, skipped = read(tmp_path)
    places = {(each.metadata["source"], each.metadata["path"]) for each in found.values()}
    assert places == {(name, str(tmp_path / name)) for name in known}
    assert found["c.txt#0"].metadata["line"] == 1
    index = f"1 a saved index ({tmp_path}/index/)"
    assert skipped == f"skipped 2: {index}; 1 of an unsupported type (x.png)"


def test_patterns_select_files_and_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "a.log", "b.csv", "sub/b.md", "sub/c.txt"):
        (tmp_path / name).write_text(f"words of {name}")
    included = names(tmp_path, include=("*.log", "sub/*"))
    assert included == {"a.log", "sub/b.md", "sub/c.txt"}  # Of any type.
    assert names(tmp_path, exclude=("sub",)) == {"a.md"}
    assert names(tmp_path, exclude=("*.txt",)) == {"a.md", "sub/b.md"}
    assert names(tmp_path, as_text=("*.csv",)) == {"a.md", "b.csv", "sub/b.md", "sub/c.txt"}
    (found,) = read_file(tmp_path, "x.html", "<p>marked", as_text=("*.html",))
    assert found.text == "<p>marked"


def test_unreadable_files_are_skipped_with_their_reason(tmp_path: Path, monkeypatch: Any) -> None:
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # Tests may run as root, who may read everything.
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "locked").mkdir()
    (tmp_path / "large.md").touch()
    os.truncate(tmp_path / "large.md", 65 << 20)
    (tmp_path / "nothing.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / b"bad\xff.txt".decode("utf-8", "surrogateescape")).write_text("a bad name")
    contents = {
        "a.txt": b"\xcf\xd0\xe8\xe2\xe5\xf2, \xec\xe8\xf0",
        "a.md": ("\u00e9l\u00e8ves " * 9).encode() + b"\xe9",
        "d.md": b"caf\x81",
        "a.csv": b"name,year\nx,1\n",
        "b.csv": b'id,text\n1,"open\n2,b\n',
        "c.csv": b'id,text\n1,"a"b\n',
        "a.json": b'{"name": "a package"}',
        "b.json": b"{broken",
        "b.ipynb": b'{"cells": [{"source": "bad \\ud83d emoji"}]}',
        "b.html": b"<meta charset=shift_jis><p>\x80\xff",
        "b.txt": b"a\0b",
        "c.html": b"<ul><li>" * 2_000 + b"deep",
        "a.docx": b"PK",
        "d.html": b"<!-- nothing else -->",
        "a.pdf": b"%PDF-1.4",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found, skipped = read(tmp_path)
    assert not found
    for part in (
        "locked/: Permission denied",
        "nothing.txt: No such file",
        "1 not a regular file (pipe.txt)",
        "MB (large.md)",
        "1 with a name that is not UTF-8",
        "not UTF-8 text (a.md, a.txt, d.md)",
        'without a field "text" (another one: --text-field) (a.csv: its columns are name, year, ',
        "2 not a valid table (b.csv: ",
        "not valid JSON (b.json: ",
        "not a valid notebook (b.ipynb: ",
        "not shift_jis text (b.html)",
        "with a NUL byte, so not text (b.txt)",
        "nested too deep (c.html)",
        "of an unsupported type (a.docx)",
        "without text (d.html)",
        "a PDF needs pypdf; install it with",
    ):
        assert part in skipped, part


def test_latin_1_is_read_with_a_note(tmp_path: Path) -> None:
    text = "Das Caf\xe9 \xf6ffnet t\xe4glich um acht \x80 und schlie\xdft sp\xe4t."
    around = {"a.csv": "id,text\n1,{}\n", "b.html": "<p>{}</p>", "c.json": '[{{"text": "{}"}}]'}
    around |= dict.fromkeys(("d.md", "e.rst", "f.txt"), "{}")
    for name, form in around.items():
        (tmp_path / name).write_bytes(form.format(text).encode("latin-1"))
    (tmp_path / "g.txt").write_text("caf\xe9", encoding="utf-8")
    found, skipped = read(tmp_path)
    texts = [each.text.strip() for each in found.values()]
    assert texts == [text.replace("\x80", "\u20ac")] * 6 + ["caf\xe9"]
    assert skipped == f"read as Latin-1, because they are not UTF-8: {', '.join(around)}"


CSV = [
    "id;body;year;code\n",
    '7;"two\nlines; and ""quotes""";2020;007\n',
    ";other;-1.5;1e5\n",
    "8;;2021;x\n",
    "9;more;1;x;too many\n",
    f"10;{'word ' * 60_000};1;x\n",
]


@pytest.mark.parametrize("delimiter", [";", ",", "\t"])
def test_rows_of_a_table_are_documents(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / ("a.tsv" if delimiter == "\t" else "a.csv")
    content = "".join(CSV).replace(";", delimiter).replace("s" + delimiter + " and", "s; and")
    path.write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    found, skipped = read(tmp_path, text_field="body")
    assert {name: each.text for name, each in found.items()} == {
        "7": 'two\nlines; and "quotes"',
        f"{path.name}#4": "other",
        "8": "",
        "10": "word " * 60_000,
    }
    assert f"1 not a document ({path.name}:6: more cells than columns" in skipped
    first, second, *_ = (each.metadata for each in found.values())
    assert (first["year"], first["code"], first["line"]) == (2020, "007", 2)
    assert (second["year"], second["code"]) == (-1.5, "1e5")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_objects_of_json_are_documents(tmp_path: Path, suffix: str) -> None:
    """Text, title and id have their meaning; other fields are metadata.

    An id that an earlier file of the folder has gets a mark.
    """
    records = [
        {"_id": "7", "title": "T", "text": "body", "lang": "en"},
        {"text": "other"},
        {"id": None, "_id": 0, "text": "a"},
    ]
    one, two = (tmp_path / f"{name}.{suffix}" for name in "ab")
    for path, some in ((one, records), (two, records[:2])):
        lines = "\n".join(map(json.dumps, some))
        path.write_text(lines if suffix == "jsonl" else json.dumps(some))
    found, _ = read(one)
    texts = {"7": "T\nbody", f"{one.name}#2": "other", "0": "a"}
    assert {name: each.text for name, each in found.items()} == texts
    facts = {"title": "T", "lang": "en", "path": str(one), "line": 1, "source": f"{one.name}:1"}
    assert found["7"].metadata == facts
    texts |= {"7~": "T\nbody", f"{two.name}#2": "other"}
    assert {name: each.text for name, each in read(tmp_path)[0].items()} == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{broken', "corpus.jsonl:2: not JSON"),
        ('{"body": "a", "n": 1}', r":1: expected .* got {'body': 'a', 'n': 1}; .* --text-field"),
        ("[1]", ":1: expected an object"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', ":2: the id '1' appears twice"),
        ('{"id": [1], "text": "a"}', r":1: the id must be a string or a number, got \[1\]"),
        (f'{{"text": "a", "m": {"[" * 400}{"]" * 400}}}', ":1: .*nested more than 100 deep"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    """In a folder it is skipped."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(RagDemoError, match=message):
        read(path)
    _, skipped = read(tmp_path)
    assert "1 not a document (corpus.jsonl:" in skipped


LONG = "A text that is long enough for a section of its own."


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
    (first, second) = read_file(tmp_path, "a.md", f"{matter}{LONG}\n\n## Next\n\n{LONG}")
    assert (first.text, first.metadata["title"]) == (LONG, "Real")
    assert (first.metadata["line"], first.metadata["start"]) == (end.count("\n") + 1, len(end))
    assert second.metadata["title"] == "Real > Next"


def test_two_rules_are_not_front_matter(tmp_path: Path) -> None:
    (document,) = read_file(tmp_path, "a.md", f"---\n\n{LONG}\n\n---\n\nmore: words")
    assert "more: words" in document.text and LONG in document.text


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", f"# One\n\n- an item of a list, no heading\n---\n\n{LONG}", ["One"]),
        ("a.md", f"# One\n\n{LONG}\n\n<!--\n# Hidden\n\nnot shown to anyone\n-->\n", ["One"]),
        ("a.md", f"# One\n\n{LONG}\n\n````\n```\n# code\n```\n# more code\n````\n", ["One"]),
        ("a.md", f"# One\n\n{LONG}\n\n> # quoted, and not a section of this text\n", ["One"]),
        ("a.md", f"# One\n\n{LONG}\n\nTwo\n---\n\n{LONG}", ["One", "One > Two"]),
        ("a.md", f"# One\n\n{LONG}\n\n  ## Two ##\n\n{LONG}", ["One", "One > Two"]),
        ("a.md", f"# {'h' * 300}\n\n{LONG}", ["h" * 200]),
        (
            "a.rst",
            f"One\n===\n\n{LONG}\n\nTwo\n---\n\n{LONG}\n\nThree\n=====\n\n{LONG}\n",
            ["One", "One > Two", "Three"],
        ),
        ("a.rst", f"===\nOne\n===\n\n{LONG}\n\nTwo\n===\n\n{LONG}\n", ["One", "One > Two"]),
        ("a.rst", f"=====\n One\n=====\n\n{LONG}\n", ["One"]),
        ("a.rst", f"One\n===\n\n{LONG}\n\n====  ====\nA     B\n====  ====\n1     2\n", ["One"]),
        ("a.rst", f"One\n===\n\n{LONG}\n\n::\n\n    Not a title\n    -----------\n", ["One"]),
    ],
)
def test_headings_are_those_of_the_format(tmp_path: Path, name: str, text: str, found: Any) -> None:
    assert titles(read_file(tmp_path, name, text)) == found


@pytest.mark.parametrize("kind", ["md", "html"])
def test_rows_of_a_table_keep_their_header(tmp_path: Path, kind: str) -> None:
    cells = [(f"option{n}", f"{n} seconds of waiting") for n in range(60)]
    content = "| name | meaning |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in cells)
    if kind == "html":
        rows = "".join(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in cells)
        content = f"<p>{LONG}</p><table><tr><th>name</th><th>meaning</th></tr>{rows}</table>"
    found = [each for each in read_file(tmp_path, f"a.{kind}", content) if "option" in each.text]
    assert len(found) > 1
    assert all(each.text.count("name") == each.text.count("meaning") == 1 for each in found)
    assert sum(each.text.count("option") for each in found) == len(cells)


def test_code_of_markdown_is_kept_together(tmp_path: Path) -> None:
    code = "```python\n" + "\n\n".join(f"value_{n} = {n} * 2" for n in range(20)) + "\n```"
    found = read_file(tmp_path, "a.md", f"{'A sentence of a text. ' * 25}\n\n{code}\n\nThe end.")
    assert any(code in each.text for each in found)


def test_comments_in_cells_of_code_are_not_headings(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": f"# One\r\r{LONG}"},
        {"cell_type": "code", "source": [f"# load the data\nx = 1  # {LONG}\n"]},
        {"cell_type": "markdown", "source": f"# Two\n\n{LONG}"},
    ]
    found = read_file(tmp_path, "a.ipynb", json.dumps({"cells": cells}))
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
    found = read_file(tmp_path, "a.html", PAGE)
    assert titles(found) == ["Caches", "Caches > Port & host"]
    text = "\n".join(each.text for each in found)
    shown = ("8443", "one item", "two items", "    return 1", "left", "right", LONG)
    assert all(part in text for part in shown), text
    assert not any(part in text for part in ("Home", "Contact", "hidden", "color", "Copyright"))


@pytest.mark.parametrize(
    "around",
    [
        "<div>{}</div>",
        "<div><b>Note.</b> {}</div>",
        "<section>{}</section>",
        "<center>{}</center>",
        "<div>{}<br>More of it.</div>",
        "<div><span>{}</span></div>",
        "{}",
        "<ul><li>{}</li></ul>",
        "<dl><dt>x</dt><dd>{}</dd></dl>",
        "<blockquote>{}</blockquote>",
    ],
)
def test_text_directly_in_an_element_is_kept(tmp_path: Path, around: str) -> None:
    """Beside paragraphs, in the order of the page."""
    text = around.format("The kettle is on from nine to five.")
    body = f"<h1>Museum</h1><p>Welcome to the museum.</p>{text}<p>Closed on Mondays. {LONG}</p>"
    for page in (f"<body>{body}</body>", f"<body><main>{body}</main></body>"):
        whole = "\n".join(each.text for each in read_file(tmp_path, "a.html", page))
        assert whole.index("Welcome") < whole.index("The kettle is on") < whole.index("Closed")


def test_short_pages_and_all_articles_are_read(tmp_path: Path) -> None:
    posts = "".join(f"<article><h2>Post {n}</h2><p>{LONG} number{n}</p></article>" for n in "abc")
    articles = (f"<main>{posts}</main>", posts, f"<div>{posts}</div>")
    pages = dict.fromkeys(articles, "numbera numberb numberc")
    pages |= dict.fromkeys(("short<br>words", "<h1>short</h1>words"), "short words")
    for page, words in pages.items():
        found = read_file(tmp_path, "a.html", page)
        assert set(words.split()) <= set(" ".join(each.text for each in found).split()), page


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "caf\u00e9 \u201cquoted\u201d"),
        ("Shift_JIS", "shift_jis", "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002"),
        ("utf-16", "utf-8", "caf\u00e9"),
        ("no-such-encoding", "utf-8", "caf\u00e9"),
    ],
)
def test_declared_encoding_counts(tmp_path: Path, declared: str, encoding: str, text: str) -> None:
    for form in (
        f'<meta charset="{declared}">',
        f"<?xml version='1.0' encoding='{declared}'?>",
        f'<meta http-equiv="Content-Type" content="text/html; charset={declared}">',
    ):
        page = f"{form}<html><body><p>{text}</p></body></html>".encode(encoding)
        (document,) = read_file(tmp_path, "a.html", page)
        assert document.text == text, form


def test_marks_and_line_ends_are_those_of_any_system(tmp_path: Path) -> None:
    for content in (
        b"\r\n# A\r\n\r\nwords\r\n",
        b"\xef\xbb\xbf# A\n\nwords\n",
        "# A\n\nwords".encode("utf-16"),
    ):
        (document,) = read_file(tmp_path, "a.md", content)
        assert (document.text, document.metadata["title"]) == ("# A\n\nwords", "A")
    (document,) = read_file(tmp_path, "a.jsonl", b'\xef\xbb\xbf\r\n{"text": "a"}\n')
    assert document.text == "a"


def test_pages_of_a_pdf_are_named_and_divided_words_joined(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="the extra pdf is not installed")
    content = pdf_of("The em-\nployee reads.", "The second page.", "The third page.")
    (document,) = read_file(tmp_path, "a.pdf", content)
    assert "employee" in document.text
    assert (document.metadata["page"], document.metadata["last_page"]) == (1, 3)
    (first, *_) = read_file(tmp_path, "b.pdf", pdf_of(f"{LONG} " * 3, LONG), chunk_size=100)
    assert first.metadata["page"] == 1 and "last_page" not in first.metadata
    with pytest.raises(RagDemoError, match=r"c\.pdf: "):
        read_file(tmp_path, "c.pdf", b"%PDF-1.4 damaged")
