"""Docstrings of sources that nobody wrote by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rag_demo.corpus import Skipped, read_source
from rag_demo.documents.docstrings import docstrings_of_file, opening_paragraph


@pytest.mark.parametrize("piece", [":", ":a", ":a:`", "f(", ") ->", ":a:`<", "`", "<", ">"])
def test_time_is_linear(piece: str) -> None:
    """Where each character looked at all that follow, this would not end today."""
    assert opening_paragraph(piece * 300_000)


def test_markup_goes() -> None:
    """Roles are their text, with a title or without."""
    text = "See :class:`~torch.Tensor`, :py:func:`add <torch.add>` and ``None``."
    assert opening_paragraph(text) == "See torch.Tensor, add and `None`."


@pytest.mark.parametrize("depth", [50, 500, 2000, 100_000])
def test_a_name_without_an_end(depth: int) -> None:
    """What is documented may be named by an expression of any depth."""
    source = f'"""The module."""\nadd_docstr(a{".b" * depth}, "Documented.")'
    found = {text for _, _, text in docstrings_of_file(source, "m")}
    assert found <= {"The module.", "Documented."}
    if depth == 50:
        assert len(found) == 2


def test_a_source_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes hundreds of bytes for each: of a table of megabytes nothing is parsed."""
    parsed = list[int]()
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(len(text)) or parse(text))
    (tmp_path / "m.py").write_text('"""Return a thing."""\n' + "x = 1\n" * 200_000)
    texts = [document.text for document in read_source(str(tmp_path), Skipped())]
    assert not parsed
    assert len(texts) > 1000
    assert "Return a thing." in texts[0]
    (tmp_path / "m.py").write_text('"""Return a thing."""\n' + "x = 1\n" * 200)
    assert len(list(read_source(str(tmp_path), Skipped()))) == len(parsed) == 1


def test_answers_have_a_line(tmp_path: Path) -> None:
    """Of a file as of a package."""
    (tmp_path / "m.py").write_text('x = 1\n\n\ndef f():\n    """Return a thing."""\n')
    (document,) = read_source(str(tmp_path), Skipped())
    assert (document.metadata["line"], document.metadata["source"]) == (4, "m.py:4")
    for document in read_source("json.decoder", Skipped()):
        assert document.metadata["source"].endswith(f":{document.metadata['line']}")
