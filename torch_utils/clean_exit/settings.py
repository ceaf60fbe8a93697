"""Defaults from the table [tool.clean-exit], or [tool.clean_exit], in pyproject.toml."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import values


class _Kind(NamedTuple):
    """What a setting takes: a TOML type, whose text goes through the option's own check."""

    types: tuple[type, ...]
    wanted: str
    make: Callable[[str], Any]


_SECONDS = _Kind((int, float), "a number of seconds", values.seconds)
_YES_OR_NO = _Kind((bool,), "true or false", lambda text: text == "True")
_TEXT = _Kind((str,), "a string", str)

# The options that a table may set.
KINDS: dict[str, _Kind] = {
    "timeout": _SECONDS,
    "max_shutdown": _SECONDS,
    "repeat": _Kind((int,), "a whole number", values.count),
    "resource_warnings": _YES_OR_NO,
    "ignore": _Kind((str,), "a list of strings", values.pattern),
    "error_exitcode": _Kind((int,), "a whole number", values.exit_code),
    "report_json": _TEXT,
    "report_junit": _TEXT,
    "github": _YES_OR_NO,
    "color": _Kind((str,), "a string", values.color),
}
_LISTS = {"ignore"}
_NAMES = ("clean-exit", "clean_exit")


def read_settings(folder: Path | None = None) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    The folder is the current one, if none is given.

    Raises:
        ValueError: The table has something that is not known, or cannot be; or the file has such
            a table, and cannot be read.
    """
    try:
        folder = folder or Path.cwd()
    except OSError:  # It was removed. A program can run in it all the same.
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
    """Return the table as TOML has it; nothing if the file does not speak of it at all."""
    data = path.read_bytes()
    # A key may be written with escapes.
    if not any(name.encode() in data for name in (*_NAMES, "\\u", "\\U")):
        return {}  # Another tool's file, whole or broken; and parsing it would take 5 ms.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    toml = _toml()
    if toml is None:
        if _seems_to_have_table(text):
            raise ValueError(f"{path}: to read [tool.clean-exit], Python 3.10 needs tomli")
        return {}
    try:
        tool = toml.loads(text).get("tool", {})
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    found = [name for name in _NAMES if isinstance(tool, dict) and name in tool]
    if len(found) > 1:
        raise ValueError(f"{path} has both [tool.clean-exit] and [tool.clean_exit]")
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


_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''.*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'|#[^\n]*", re.DOTALL
)


def _seems_to_have_table(text: str) -> bool:
    """Say whether there is such a table, without a parser: by headers and keys alone."""

    def blank(match: re.Match[str]) -> str:
        # Only what could be a quoted key stays.
        return match[0].strip("\"'") if re.fullmatch(r"[\"'][\w-]*[\"']", match[0]) else ""

    table: list[str] = []
    for line in _STRING_OR_COMMENT.sub(blank, text).splitlines():
        header = re.match(r"\s*\[\[?([^\[\]]+)\]", line)
        key = re.match(r"([^=]+)=", line)
        if header:
            table = _parts(header[1])
        name = table + (_parts(key[1]) if key and not header else [])
        if name[:1] == ["tool"] and name[1:2] and name[1] in _NAMES:
            return True
        if name == ["tool"] and re.search(r"[{,]\s*clean[-_]exit\s*[.=]", line):
            return True
    return False


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split(".")]


def _checked(table: dict[str, Any], path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in KINDS:
            known = ", ".join(sorted(KINDS)).replace("_", "-")
            raise ValueError(f"{path}: [tool.clean-exit] has {key!r}; it may have {known}")
        if name in settings:
            raise ValueError(f"{path}: [tool.clean-exit] has {key!r} twice")
        kind = KINDS[name]
        is_right = isinstance(value, list) if name in _LISTS else True
        items = value if name in _LISTS and is_right else [value]
        # To Python, true is a whole number.
        is_right = is_right and all(
            isinstance(item, kind.types) and isinstance(item, bool) == (bool in kind.types)
            for item in items
        )
        if not is_right:
            raise ValueError(
                f"{path}: [tool.clean-exit] {key} has to be {kind.wanted}, not {value!r}"
            )
        try:
            made = [kind.make(str(item)) for item in items]
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path}: [tool.clean-exit] {key}: {error}") from None
        settings[name] = made if name in _LISTS else made[0]
    return settings
