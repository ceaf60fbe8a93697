"""Documents out of folders, JSON lines and packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_demo.corpus import Skipped, read_source
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
    wanted = "skipped 2: 2 .txt that is not UTF-8 text (binary.txt, latin.txt)"
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{broken', r"corpus\.jsonl:2: not JSON"),
        ('{"body": "a"}', r':1: expected an object with a string "text"'),
        ("[1]", r":1: expected an object"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', r":2: the id '1' stands twice"),
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
