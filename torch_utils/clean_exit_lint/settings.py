"""Defaults from the table [tool.clean_exit_lint], or [tool.clean-exit-lint], in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_NAMES = ("clean_exit_lint", "clean-exit-lint")
_LISTS = ("select", "ignore", "exclude", "paths")
_TEXTS = ("baseline", "format")


def read_settings(folder: Path | None = None) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    Paths in it, and the baseline, are relative to the file.

    Raises:
        ValueError: The table has something that is not known, or cannot be; or the file has such
            a table, and cannot be read.
    """
    try:
        folder = folder or Path.cwd()
    except OSError:  # It was removed.
        return {}
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        try:
            if path.is_file():
                return _checked(_load(path), path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return {}


def _load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if not any(name.encode() in data for name in _NAMES):
        return {}  # Another tool's file, whole or broken.
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    toml = _toml()
    if toml is None:
        has_table = any(f"[tool.{name}]" in text for name in _NAMES)
        if has_table:
            raise ValueError(f"{path}: to read [tool.clean_exit_lint], Python 3.10 needs tomli")
        return {}
    try:
        tool = toml.loads(text).get("tool", {})
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    found = [name for name in _NAMES if isinstance(tool, dict) and name in tool]
    if len(found) > 1:
        raise ValueError(f"{path} has both [tool.clean_exit_lint] and [tool.clean-exit-lint]")
    table = tool[found[0]] if found else {}
    if not isinstance(table, dict):
        raise ValueError(f"{path}: tool.{found[0]} has to be a table, not {table!r}")
    return table


def _toml() -> ModuleType | None:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    try:
        import tomli
    except ImportError:
        return None
    module: ModuleType = tomli
    return module


def _checked(table: dict[str, Any], path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in (*_LISTS, *_TEXTS):
            known = ", ".join(sorted((*_LISTS, *_TEXTS)))
            raise ValueError(f"{path}: [tool.clean_exit_lint] has {key!r}; it may have {known}")
        if name in _LISTS:
            is_right = isinstance(value, list) and all(isinstance(item, str) for item in value)
            wanted = "a list of strings"
        else:
            is_right, wanted = isinstance(value, str), "a string"
        if not is_right:
            raise ValueError(
                f"{path}: [tool.clean_exit_lint] {key} has to be {wanted}, not {value!r}"
            )
        settings[name] = value
    for name in ("baseline", "paths"):
        if name in settings:
            said = settings[name]
            settings[name] = (
                [_from(path.parent, one) for one in said]
                if isinstance(said, list)
                else _from(path.parent, said)
            )
    return settings


def _from(folder: Path, name: str) -> str:
    """Return a path of the file as it is from here, short where that is possible."""
    whole = folder / name
    try:
        return str(whole.relative_to(Path.cwd()))
    except ValueError:
        return str(whole)
