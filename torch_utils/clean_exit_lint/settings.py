"""Defaults from the table [tool.clean_exit_lint], or [tool.clean-exit-lint], in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._pyproject import TEXT, TEXTS, Tool, read_table

_TOOL = Tool(
    ("clean_exit_lint", "clean-exit-lint"),
    {
        "select": TEXTS,
        "ignore": TEXTS,
        "exclude": TEXTS,
        "paths": TEXTS,
        "baseline": TEXT,
        "format": TEXT,
    },
)


def read_settings(folder: Path | None = None) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    Paths in it, and the baseline, are relative to the file.

    Raises:
        ValueError: The table has something that is not known, or cannot be; or the file has such
            a table, and cannot be read.
    """
    settings, place = read_table(_TOOL, folder)
    if "baseline" in settings:
        settings["baseline"] = _from(place, settings["baseline"])
    if "paths" in settings:
        settings["paths"] = [_from(place, one) for one in settings["paths"]]
    return settings


def _from(folder: Path, name: str) -> str:
    """Return a path of the file as it is from here, short where that is possible."""
    whole = folder / name
    try:
        return str(whole.relative_to(Path.cwd()))
    except ValueError:
        return str(whole)
