"""Defaults from the table [tool.clean_exit] in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# The options that a table may set, and what each takes.
KINDS: dict[str, tuple[type, ...]] = {
    "timeout": (int, float),
    "max_shutdown": (int, float),
    "repeat": (int,),
    "resource_warnings": (bool,),
    "ignore": (list,),
    "error_exitcode": (int,),
    "report_json": (str,),
    "report_junit": (str,),
    "github": (bool,),
    "color": (str,),
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the table from the nearest pyproject.toml, in this folder or above; else nothing.

    Raises:
        ValueError: The table has something that is not known.
    """
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            return _checked(_load(path), path)
    return {}


def _load(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if "[tool.clean_exit]" not in text:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise ValueError(
                f"{path}: to read [tool.clean_exit], Python 3.10 needs tomli"
            ) from None
    try:
        table: dict[str, Any] = tomllib.loads(text)["tool"]["clean_exit"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    return table


def _checked(table: dict[str, Any], path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in KINDS:
            known = ", ".join(sorted(KINDS)).replace("_", "-")
            raise ValueError(f"{path}: [tool.clean_exit] has {key!r}; it may have {known}")
        kinds = KINDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{path}: [tool.clean_exit] {key} has to be {wanted}, not {value!r}")
        settings[name] = value
    return settings
