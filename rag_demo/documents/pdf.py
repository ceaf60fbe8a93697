"""The text of a PDF file, by the library pypdf, which the extra ``pdf`` installs."""

from __future__ import annotations

import io
import logging

from rag_demo.documents.extracted_text import ExtractedText, TextBuilder

__all__ = ["MissingReaderError", "read_pdf"]


class MissingReaderError(Exception):
    """The library that reads a kind of file is not installed."""


def read_pdf(content: bytes) -> ExtractedText:
    """Return the text of all pages as paragraphs; places are the numbers of pages.

    Raises:
        MissingReaderError: pypdf is not installed.
        ValueError: The file is none, is damaged, or asks for a password.
    """
    try:
        import pypdf
    except ImportError:
        raise MissingReaderError(
            "it needs pypdf: pip install '.[pdf]', in a clone of torch-cleanup"
        ) from None
    # Its warnings, of which a damaged file has hundreds, are for who asks for them.
    logging.getLogger("pypdf").addHandler(logging.NullHandler())
    text = TextBuilder("page")
    try:
        for number, page in enumerate(pypdf.PdfReader(io.BytesIO(content)).pages, start=1):
            text.add(page.extract_text() + "\n\n", number)
    except Exception as error:
        # It raises what it likes at a damaged file: KeyError, AttributeError, RecursionError ...
        raise ValueError(str(error) or type(error).__name__) from None
    return text.finish()
