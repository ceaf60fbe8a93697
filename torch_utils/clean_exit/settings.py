"""Defaults from the table [tool.clean-exit], or [tool.clean_exit], in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._pyproject import TEXT, Kind, Tool, read_table
from . import values

_SECONDS = Kind((int, float), "a number of seconds", values.seconds)
_YES_OR_NO = Kind((bool,), "true or false", lambda text: text == "True")

# The options that a table may set.
KINDS: dict[str, Kind] = {
    "timeout": _SECONDS,
    "max_shutdown": _SECONDS,
    "repeat": Kind((int,), "a whole number", values.count),
    "resource_warnings": _YES_OR_NO,
    "ignore": Kind((str,), "a list of strings", values.pattern, is_list=True),
    "error_exitcode": Kind((int,), "a whole number", values.exit_code),
    "report_json": TEXT,
    "report_junit": TEXT,
    "github": _YES_OR_NO,
    "color": Kind((str,), "a string", values.color),
}


def read_settings(folder: Path | None = None) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    The folder is the current one, if none is given.

    Raises:
        ValueError: The table has something that is not known, or cannot be; or the file has such
            a table, and cannot be read.
    """
    return read_table(Tool(("clean-exit", "clean_exit"), KINDS), folder)[0]
