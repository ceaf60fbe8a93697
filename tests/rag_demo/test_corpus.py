"""Documents out of folders, JSON lines and packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_demo.corpus import Reading, Skipped, _unused, read_source
from rag_demo.documents.docstrings import docstrings_of_file, opening_paragraph
from rag_demo.documents.document import Document
from rag_demo.documents.passages import cut
from rag_demo.errors import SourceError


def read(source: str | Path) -> tuple[list[Document], Skipped]:
    skipped = Skipped()
    return list(read_source(str(source), skipped)), skipped


def test_folder(tmp_path: Path) -> None:
    """Every known kind of file is read; markup is not text; hidden and other files are not read."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("# Caches\n\nThe cache holds unused blocks of memory.\n")
    (tmp_path / "deep" / "b.txt").write_text("Plain words about the garbage collector.\n")
    (tmp_path / "c.html").write_text(
        "<html><style>p {color: red}</style><script>var hidden = 1</script>"
        "<h1>Title</h1><p>Visible &amp; readable paragraph.</p></html>"
    )
    (tmp_path / "d.py").write_text('def f():\n    """Return what the caller asked for."""\n')
    (tmp_path / "e.rst").write_text("Restructured words, but words nevertheless.\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("should never be seen by anyone\n")
    documents, skipped = read(tmp_path)
    by_source = {d.metadata["source"]: d for d in documents}
    assert set(by_source) == {"a.md", "deep/b.txt", "c.html", "d.py:1", "e.rst"}
    assert by_source["a.md"].metadata["title"] == "Caches"
    assert "Visible & readable paragraph." in by_source["c.html"].text
    assert "hidden" not in by_source["c.html"].text
    assert by_source["d.py:1"].text == "d.f: Return what the caller asked for."
    assert str(skipped) == "skipped 1: 1 .png of no kind that is read (image.png)"
    assert len({d.id for d in documents}) == len(documents)


def test_undecodable_files_are_skipped_and_counted(tmp_path: Path) -> None:
    """Neither Latin-1 nor binary files stop the others."""
    (tmp_path / "good.txt").write_text("Words that can be read by everyone.")
    (tmp_path / "latin.txt").write_bytes(
        "caf\xe9 cr\xe8me, words in another encoding".encode("latin-1")
    )
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2" * 100)
    documents, skipped = read(tmp_path)
    assert len(documents) == 1
    wanted = "skipped 2: 2 .txt that are not UTF-8 text (binary.txt, latin.txt)"
    assert str(skipped) == wanted


def test_jsonl(tmp_path: Path) -> None:
    """Text, title and id have their meaning; the rest is metadata."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"_id": "7", "title": "T", "text": "body", "lang": "en"}, {"text": "other"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    documents, _ = read(path)
    assert documents[0] == Document(
        "7", "T\nbody", {"title": "T", "lang": "en", "source": "corpus.jsonl:1"}
    )
    assert documents[1].id == "2"


def test_an_id_of_null_is_none(tmp_path: Path) -> None:
    """The other one names the document, or the number of the line does."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": null, "_id": 0, "text": "a"}\n{"id": null, "text": "b"}')
    documents, _ = read(path)
    assert [(document.id, document.metadata) for document in documents] == [
        ("0", {"source": "corpus.jsonl:1"}),
        ("2", {"source": "corpus.jsonl:2"}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{broken', r"corpus\.jsonl:2: not JSON"),
        (
            '{"body": "a", "n": 1}',
            r':1: expected .* "text"; its fields are \'body, n\'.*--text-field',
        ),
        ("{}", r":1: expected .*; it has no fields"),
        ("[1]", r":1: expected an object"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', r":2: the id '1' stands twice"),
        ('{"id": [1], "text": "a"}', r":1: the id is \[1\], which is no text and no number"),
        ('{"id": true, "text": "a"}', r":1: the id is true"),
        (f'{{"text": "a", "m": {"[" * 400}{"]" * 400}}}', r":1: .*nested more than 100 deep"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    """An error says which line, and what was expected there."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(SourceError, match=message):
        read(path)


def test_package_is_not_imported() -> None:
    """Docstrings come from the source: a package is read without running it."""
    import sys

    sys.modules.pop("this", None)
    documents, _ = read("json")
    assert any(d.metadata["title"] == "json.dumps" for d in documents)
    read("this")
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_package", "neither a file or folder here nor an installed package"),
        ("./no/such/folder", "does not exist"),
        ("sys", "no Python source"),
    ],
)
def test_unknown_sources(source: str, message: str) -> None:
    """What is not there is named, with what could be."""
    with pytest.raises(SourceError, match=message):
        read(source)


def test_unknown_kind_of_file(tmp_path: Path) -> None:
    """A file of another kind is refused with the kinds that can be read."""
    (tmp_path / "table.xlsx").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"known: \.md \.markdown"):
        read(tmp_path / "table.xlsx")


def test_chunks_keep_offsets_and_headings() -> None:
    """Each passage says where it begins, and none is longer than a model reads."""
    text = "# One\n\n" + "word " * 500 + "\n\n## Two\n\nAnother passage that is short.\n"
    passages = list(cut(text))
    assert len(passages) > 3
    assert all(len(passage.text) <= 900 for passage in passages)
    assert passages[0].heading == "One"
    assert passages[-1].heading == "Two"
    for passage in passages:
        assert text[passage.start :].startswith(passage.text[:20])
        assert text[: passage.stop].endswith(passage.text[-20:])


def test_docstrings_of_c_extensions() -> None:
    """Documentation that is registered by a call is found, without its signature."""
    source = 'add_docstr(torch.mm, r"""\nmm(a, b) -> Tensor\n\nMultiplies :attr:`a` by b.\n""")'
    ((name, _, text),) = docstrings_of_file(source, "torch._torch_docs")
    assert name == "torch.mm"
    assert opening_paragraph(text) == "Multiplies a by b."


def test_long_paragraphs_are_cut_after_sentences() -> None:
    """Where there are any; at a space, or within a word, otherwise. Nothing is lost."""
    sentence = 'He said: "This is a sentence of some length!" And so it was, at 3.5 per cent. '
    text = sentence * 40
    passages = list(cut(text))
    assert len(passages) > 3
    assert all(passage.text.endswith(("cent.", 'length!"')) for passage in passages)
    assert all(text[passage.start :].startswith(passage.text) for passage in passages)
    assert "".join("".join(p.text.split()) for p in passages) == "".join(text.split())
    for text in ("word " * 600, "x" * 3000):
        passages = list(cut(text))
        assert all(0 < len(passage.text) <= 800 for passage in passages)
        assert "".join("".join(p.text.split()) for p in passages) == "".join(text.split())


def test_more_kinds_of_files(tmp_path: Path) -> None:
    """A README without a suffix, long names of kinds, notebooks, JSON lines; each has a place."""
    (tmp_path / "README").write_text("Read me first.")
    (tmp_path / "b.markdown").write_text("# Long name\n\nOf a suffix that is used as well.\n")
    cells = [
        {"cell_type": "markdown", "source": ["# Notes\n", "about the port 8443"]},
        {"cell_type": "code", "source": "print('the second cell is longer')", "outputs": ["x"]},
    ]
    (tmp_path / "c.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "d.jsonl").write_text('{"id": 1, "text": "a"}\nbroken\n{"id": 1, "text": "b"}\n')
    (tmp_path / "e.HTML").write_text('<p id="p1">short\n<p>and longer words in it')
    documents, skipped = read(tmp_path)
    by_id = {document.id: document for document in documents}
    assert by_id["README#0"].text == "Read me first."
    assert by_id["b.markdown#0"].metadata["title"] == "Long name"
    assert "second cell" in by_id["c.ipynb#0"].text
    assert by_id["c.ipynb#0"].metadata["cell"] == 1
    assert by_id["d.jsonl#1"].metadata["line"] == 1
    assert by_id["e.HTML#0"].metadata["anchor"] == "p1"
    paths = {document.metadata["path"] for document in documents}
    assert paths == {str(path) for path in tmp_path.iterdir()}
    assert "2 lines that are no document (d.jsonl:2: not JSON" in str(skipped)


def pdf_of(*pages: str) -> bytes:
    """Write a PDF by hand: a page for each text."""
    count = len(pages)
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(count))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {count} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    content, offsets = "%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        offsets.append(len(content))
        content += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    trailer = (
        f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF"
    )
    return (content + head + trailer).encode("ascii")


def test_pdf(tmp_path: Path) -> None:
    """Pages are places; a damaged file is named, and does not end the run."""
    pytest.importorskip("pypdf", reason="the extra pdf is not installed")
    (tmp_path / "a.pdf").write_bytes(
        pdf_of("The first page is about memory.", "The second page is about the port.")
    )
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 damaged")
    documents, skipped = read(tmp_path)
    assert "port" in documents[-1].text
    assert documents[0].metadata["page"] == 1
    assert "1 .pdf that is no whole PDF (b.pdf: " in str(skipped)


def test_pdf_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to install, at the end for a folder and as an error for a file."""
    import sys

    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "a.pdf").write_bytes(pdf_of("words"))
    documents, skipped = read(tmp_path)
    assert documents == []
    assert "a.pdf: it needs pypdf: pip install '.[pdf]'" in str(skipped)
    with pytest.raises(SourceError, match="pip install"):
        read(tmp_path / "a.pdf")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders, links to nothing, pipes, what is too large: none of them ends the run."""
    import os

    from rag_demo.documents import files

    (tmp_path / "good.txt").write_text("words")
    (tmp_path / "secret.txt").write_text("words")
    (tmp_path / "locked").mkdir()
    (tmp_path / "large.md").write_text("x" * 100)
    (tmp_path / "nothing.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / b"bad\xff.txt".decode("utf-8", "surrogateescape")).write_text("a bad name")
    open_now, iterdir_now = os.open, Path.iterdir

    def refusing_open(path: Path, *arguments: int, **options: object) -> int:
        if Path(path).name == "secret.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open_now(path, *arguments, **options)

    def refusing_iterdir(path: Path) -> object:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir_now(path)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(Path, "iterdir", refusing_iterdir)
    monkeypatch.setattr(files, "MOST_BYTES", 50)
    documents, skipped = read(tmp_path)
    assert sorted(document.text for document in documents) == ["a bad name", "words"]
    for named in (
        "locked/: Permission denied",
        "secret.txt: Permission denied",
        "nothing.txt: No such file",
        "that is no regular file (pipe.txt)",
        "1 folder that is a link (round/)",
        "1 .md of more than 0 MB (large.md)",
    ):
        assert named in str(skipped), named


def test_chosen_files(tmp_path: Path) -> None:
    """Patterns for names and paths; what is included is read whatever its suffix."""
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "a.log", "sub/b.md", "sub/c.txt"):
        (tmp_path / name).write_text(f"words of {name}")

    def sources(**reading: tuple[str, ...]) -> set[str]:
        found = read_source(str(tmp_path), Skipped(), Reading(**reading))
        return {document.metadata["source"] for document in found}

    assert sources(include=("*.log", "sub/*")) == {"a.log", "sub/b.md", "sub/c.txt"}
    assert sources(exclude=("sub",)) == {"a.md"}
    assert sources(exclude=("*.txt",)) == {"a.md", "sub/b.md"}


def test_an_index_is_no_source(tmp_path: Path) -> None:
    """An index within the folder is not read, although its texts are JSON lines."""
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "index").mkdir()
    for name in ("manifest.json", "vectors-abc.safetensors", "texts-abc.jsonl"):
        (tmp_path / "index" / name).write_text('{"id": "x", "text": "y"}')
    documents, skipped = read(tmp_path)
    assert [document.text for document in documents] == ["words"]
    assert "1 folder that is a saved index (index/)" in str(skipped)


def test_skipped_stays_small() -> None:
    """A line, however much was passed over."""
    skipped = Skipped()
    for number in range(10_000):
        skipped.add(f"log.jsonl:{number}", "that is no document", f"char {number}")
        skipped.add(f"{number}.x{number % 100}", "of no kind that is read")
    assert len(skipped) == 20_000
    assert len(str(skipped)) < 2000


@pytest.mark.parametrize("content", [b"\r\n# A\r\n\r\nwords\r\n", b"\xef\xbb\xbf# A\n\nwords\n"])
def test_line_ends_and_marks(tmp_path: Path, content: bytes) -> None:
    """Those of Windows are read as any other."""
    (tmp_path / "a.md").write_bytes(content)
    ((document,), _) = read(tmp_path)
    assert document.metadata["title"] == "A"
    assert document.text == "# A\n\nwords"


def test_ids_differ(tmp_path: Path) -> None:
    """Two docstrings on one line are two documents."""
    (tmp_path / "a.py").write_text("add_docstr(f, 'first one'); add_docstr(g, 'second one')\n")
    documents, _ = read(tmp_path)
    assert len({document.id for document in documents}) == len(documents) == 2
    # Where each looked at all before it, this would not end today.
    seen: dict[str, int] = {}
    assert len({_unused("a.py:1#0", seen) for _ in range(200_000)}) == 200_000
    assert _unused("a.py:1#0~2", seen) == "a.py:1#0~2~2"
