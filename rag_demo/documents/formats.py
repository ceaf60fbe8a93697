"""Readers of notebooks and PDF files."""

from __future__ import annotations

import io
import json
import logging

from rag_demo.documents.extracted_text import ExtractedText, TextBuilder


class MissingReaderError(Exception):
    """The library that reads a kind of file is not installed."""


def read_notebook(content: str) -> ExtractedText:
    """Return the sources of a Jupyter notebook's cells. Positions are the numbers of cells.

    Raises:
        ValueError: The content is not a notebook.
    """
    try:
        notebook = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("it has no list of cells")
    text = TextBuilder("cell")
    for number, cell in enumerate(cells, start=1):
        source = cell.get("source") if isinstance(cell, dict) else None
        lines = [source] if isinstance(source, str) else source
        if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
            text.add("".join(lines) + "\n\n", number)
    return text.finish()


def read_pdf(content: bytes) -> ExtractedText:
    """Return the text of a PDF file's pages. Positions are the numbers of pages.

    Raises:
        MissingReaderError: pypdf is not installed.
        ValueError: The file is not a PDF, is damaged, or needs a password.
    """
    try:
        import pypdf
    except ImportError:
        raise MissingReaderError(
            "it needs pypdf: pip install '.[pdf]', in a clone of torch-cleanup"
        ) from None
    # A damaged file causes hundreds of warnings.
    logging.getLogger("pypdf").addHandler(logging.NullHandler())
    text = TextBuilder("page")
    try:
        for number, page in enumerate(pypdf.PdfReader(io.BytesIO(content)).pages, start=1):
            text.add(page.extract_text() + "\n\n", number)
    except Exception as error:
        # A damaged file raises KeyError, AttributeError, RecursionError and others.
        raise ValueError(str(error) or type(error).__name__) from None
    return text.finish()
