"""A tool's table in the nearest pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_table(tool: str, known: Collection[str], folder: Path | None = None) -> dict[str, Any]:
    """Read the table ``[tool.<tool>]``, in a folder or the nearest one above that has the file.

    Args:
        tool: The name of the table, with hyphens; it may also be written with underscores.
        known: The names of the settings, with hyphens.
        folder: The current folder by default.

    Returns:
        The settings, by names with hyphens, and as ``""`` the path of the file; empty without a
        table.

    Raises:
        ValueError: The file cannot be read, or the table has a setting that is not known.
    """
    path = _find(folder)
    if path is None:
        return {}
    names = {tool, tool.replace("-", "_")}
    tables = _load(path, names).get("tool", {})
    found = sorted(names & tables.keys()) if isinstance(tables, dict) else []
    if not found:
        return {}
    if len(found) > 1:
        raise ValueError(f"{path} has both [tool.{found[0]}] and [tool.{found[1]}]; remove one")
    table = tables[found[0]]
    if not isinstance(table, dict):
        raise ValueError(f"{path}: tool.{found[0]} must be a table, not {table!r}")
    settings: dict[str, Any] = {"": path}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ValueError(
                f"{path}: unknown setting {key!r} in [tool.{tool}]; use {', '.join(sorted(known))}"
            )
        if name in settings:
            raise ValueError(f"{path}: [tool.{tool}] has {name!r} twice")
        settings[name] = value
    return settings


def _find(folder: Path | None) -> Path | None:
    try:
        folder = (folder or Path.cwd()).absolute()
    except OSError:  # The current folder was removed; a program can run in it all the same.
        return None
    paths = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Not by Path, which raises below a folder that may not be entered.
    return next((path for path in paths if os.path.isfile(path)), None)


def _load(path: Path, names: Collection[str]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not any(name.encode() in data for name in names):
        return {}  # Importing a parser and parsing take 5 ms.
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        settings: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except ImportError:
        raise ValueError(f"{path}: Python 3.10 needs tomli to read it") from None
    except (ValueError, RecursionError) as error:  # Not TOML, or not UTF-8.
        raise ValueError(f"{path} is not valid: {error}") from None
    return settings
