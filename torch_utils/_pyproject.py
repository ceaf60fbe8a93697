"""A tool's table in pyproject.toml: found, parsed, and checked against what it may have."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What a setting takes: a TOML type, whose text goes through the option's own check."""

    types: tuple[type, ...]
    wanted: str
    make: Callable[[str], Any] = str
    is_list: bool = False


TEXT = Kind((str,), "a string")
TEXTS = Kind((str,), "a list of strings", is_list=True)


class Tool(NamedTuple):
    """A tool by the two spellings of its table, the usual one first, and what that may have."""

    names: tuple[str, str]
    kinds: Mapping[str, Kind]

    @property
    def label(self) -> str:
        """How messages name its table."""
        return f"[tool.{self.names[0]}]"


def read_table(tool: Tool, folder: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Read a tool's table from the nearest pyproject.toml, in a folder or above; else nothing.

    Args:
        tool: Whose table it is.
        folder: The current one, if none is given.

    Returns:
        What is set, by names with underscores, and the folder of the file.

    Raises:
        ValueError: The table has something that is not known, or cannot be; or the file has such
            a table, and cannot be read.
    """
    try:
        folder = folder or Path.cwd()
    except OSError:  # It was removed. A program can run in it all the same.
        return {}, Path()
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        try:
            if path.is_file():
                return _checked(tool, _load(tool, path), path), place
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return {}, folder


def _load(tool: Tool, path: Path) -> dict[str, Any]:
    """Return the table as TOML has it; nothing if the file does not speak of it at all."""
    data = path.read_bytes()
    # A key may be written with escapes.
    if not any(name.encode() in data for name in (*tool.names, "\\u", "\\U")):
        return {}  # Another tool's file, whole or broken; and parsing it would take 5 ms.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    toml = _toml()
    if toml is None:
        if _seems_to_have_table(tool, text):
            raise ValueError(f"{path}: to read {tool.label}, Python 3.10 needs tomli")
        return {}
    try:
        tables = toml.loads(text).get("tool", {})
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read") from None
    found = [name for name in tool.names if isinstance(tables, dict) and name in tables]
    if len(found) > 1:
        raise ValueError(f"{path} has both [tool.{found[0]}] and [tool.{found[1]}]")
    table = tables[found[0]] if found else {}
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


_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''.*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'|#[^\n]*", re.DOTALL
)


def _seems_to_have_table(tool: Tool, text: str) -> bool:
    """Say whether there is such a table, without a parser: by headers and keys alone."""

    def blank(match: re.Match[str]) -> str:
        # Only what could be a quoted key stays.
        return match[0].strip("\"'") if re.fullmatch(r"[\"'][\w-]*[\"']", match[0]) else ""

    inline = re.compile(rf"[{{,]\s*({'|'.join(tool.names)})\s*[.=]")
    table: list[str] = []
    for line in _STRING_OR_COMMENT.sub(blank, text).splitlines():
        header = re.match(r"\s*\[\[?([^\[\]]+)\]", line)
        key = re.match(r"([^=]+)=", line)
        if header:
            table = _parts(header[1])
        name = table + (_parts(key[1]) if key and not header else [])
        if name[:1] == ["tool"] and name[1:2] and name[1] in tool.names:
            return True
        if name == ["tool"] and inline.search(line):
            return True
    return False


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split(".")]


def _checked(tool: Tool, table: dict[str, Any], path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in tool.kinds:
            known = ", ".join(sorted(tool.kinds)).replace("_", "-")
            raise ValueError(f"{path}: {tool.label} has {key!r}; it may have {known}")
        if name in settings:
            raise ValueError(f"{path}: {tool.label} has {key!r} twice")
        kind = tool.kinds[name]
        items = value if kind.is_list and isinstance(value, list) else [value]
        # To Python, true is a whole number.
        is_right = isinstance(value, list) == kind.is_list and all(
            isinstance(item, kind.types) and isinstance(item, bool) == (bool in kind.types)
            for item in items
        )
        if not is_right:
            raise ValueError(f"{path}: {tool.label} {key} has to be {kind.wanted}, not {value!r}")
        try:
            made = [kind.make(str(item)) for item in items]
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path}: {tool.label} {key}: {error}") from None
        settings[name] = made if kind.is_list else made[0]
    return settings
