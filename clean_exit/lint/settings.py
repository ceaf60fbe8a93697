"""Defaults from the table [tool.clean_exit_lint], or [tool.clean-exit-lint], in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clean_exit.pyproject import read_table

_LISTS = ("select", "ignore", "exclude", "paths")
_TEXTS = ("baseline", "format")


def read_settings(folder: Path | None = None) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    Paths in it, and the baseline, are relative to the file.

    Raises:
        ValueError: The file cannot be read, or the table is invalid.
    """
    settings = read_table("clean-exit-lint", (*_LISTS, *_TEXTS), folder)
    path = settings.pop("", None)
    for key, value in settings.items():
        items = value if key in _LISTS else [value]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            wanted = "a list of strings" if key in _LISTS else "a string"
            raise ValueError(
                f"{path}: [tool.clean_exit_lint] {key} must be {wanted}, not {value!r}"
            )
    if path is not None and "baseline" in settings:
        settings["baseline"] = _from(path.parent, settings["baseline"])
    if path is not None and "paths" in settings:
        settings["paths"] = [_from(path.parent, one) for one in settings["paths"]]
    return settings


def _from(folder: Path, name: str) -> str:
    """Return a path of the file as it is from here, short where that is possible."""
    whole = folder / name
    try:
        return str(whole.relative_to(Path.cwd()))
    except ValueError:
        return str(whole)
