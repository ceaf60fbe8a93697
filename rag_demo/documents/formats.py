"""Readers of notebooks and PDF files."""

from __future__ import annotations

import io
import json
import logging

from rag_demo.documents.extracted_text import ExtractedText


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
    sources = [cell.get("source") if isinstance(cell, dict) else None for cell in cells]
    texts = ["".join(map(str, each)) if isinstance(each, (str, list)) else "" for each in sources]
    return ExtractedText.of("cell", ((f"{t}\n\n", n, None) for n, t in enumerate(texts, 1)))


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
    try:
        texts = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages]
    except Exception as error:
        # A damaged file raises KeyError, AttributeError, RecursionError and others.
        raise ValueError(str(error) or type(error).__name__) from None
    return ExtractedText.of("page", ((f"{t}\n\n", n, None) for n, t in enumerate(texts, 1)))
