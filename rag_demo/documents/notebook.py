"""The text of a Jupyter notebook: what its cells say, not what they printed."""

from __future__ import annotations

import json

from rag_demo.documents.extracted_text import ExtractedText, TextBuilder

__all__ = ["read_notebook"]


def read_notebook(content: str) -> ExtractedText:
    """Return the sources of all cells as paragraphs; places are the numbers of cells.

    Raises:
        ValueError: It is no notebook.
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
