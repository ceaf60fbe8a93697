"""What both commands share: types of arguments, pyproject.toml, explanations and output."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO


class Parser(argparse.ArgumentParser):
    """A parser that exits with its own code after one line on stderr."""

    def __init__(self, usage_code: int, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )
        self._usage_code = usage_code
        self._where = ""

    def error(self, message: str) -> Any:
        """Print an error and exit."""
        if self._where:
            raise ValueError(f"{self._where} {message}")
        self.exit(self._usage_code, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_settings(self, words: Sequence[str], where: str) -> argparse.Namespace:
        """Parse settings that were written as options; this parser raises errors from then on.

        Raises:
            ValueError: One is invalid. The message begins with ``where``.
        """
        self._where = where
        return self.parse_args(words)


def version() -> str:
    """Return the version of the distribution, or a note that the package was only copied."""
    try:
        return metadata.version("torch-cleanup")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def explain(page: str, name: str, known: Mapping[str, str]) -> str:
    """Return a summary and the section of a catalogue, which is a page in this package.

    Args:
        page: The file.
        name: The finding or rule.
        known: The summary of each existing finding or rule.

    Raises:
        ValueError: The name does not exist. The message lists the names.
    """
    if name not in known:
        raise ValueError(f"cannot explain {name!r}; choose from {', '.join(known)}")
    text = Path(__file__).with_name(page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return f"{known[name]}\n\n{section.strip()}"


def write(stream: TextIO | None, text: str) -> OSError | None:
    """Write to stdout or stderr, with escapes for what its encoding lacks; return the error."""
    try:
        if stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        if stream is not None:  # Python would exit with 120 if it could not flush the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if stream is sys.stdout else 2)
        return error
    return None


def print_out(text: str) -> None:
    """Write a text and a line feed to stdout.

    Raises:
        ValueError: It cannot be written.
    """
    error = write(sys.stdout, text + "\n")
    if error and not isinstance(error, BrokenPipeError):  # A reader such as head has gone.
        raise ValueError(f"stdout cannot be written to: {error.strerror}")


def nonempty(text: str) -> str:
    """Refuse an empty value, such as that of an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def output_file(text: str) -> str:
    """Refuse an empty name, "-", and a Python file that the report would overwrite."""
    if nonempty(text).endswith(".py"):
        raise argparse.ArgumentTypeError(f"would overwrite the program {text}; name another file")
    if text == "-":
        raise argparse.ArgumentTypeError("cannot be stdout; name a file")
    return text


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        TypeError: The pattern is not a string.
        ValueError: The pattern is invalid or empty.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a regular expression must be a string, got {pattern!r}")
    if not pattern:
        raise ValueError("a regular expression must not be empty; it would match everything")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int, str)),
    float: ("a number", (int, float, str)),
    str: ("a string", (str,)),
    list: ("a list of strings", (list,)),
    dict: ("a table of lists of strings", (dict,)),
}


def read_table(tool: str, known: Mapping[str, type], folder: Path | None = None) -> dict[str, Any]:
    """Read the table ``[tool.<tool>]`` of the nearest pyproject.toml.

    Args:
        tool: The name of the table.
        known: The type of each setting: bool, int, float, str, list or dict.
        folder: Where the search for the file starts; the current folder by default.

    Returns:
        The settings by name, and the path of the file under ``""``. Empty if there is no table.

    Raises:
        ValueError: The file cannot be read, or the table has an unknown setting or a wrong type.
    """
    path = _find(folder)
    if path is None:
        return {}
    tables = _load(path, tool).get("tool", {})
    if not isinstance(tables, dict) or tool not in tables:
        return {}
    table = tables[tool]
    if not isinstance(table, dict):
        raise ValueError(f"{path}: tool.{tool} must be a table, got {table!r}")
    for name, value in table.items():
        if name not in known:
            settings = ", ".join(sorted(known))
            raise ValueError(f"{path}: unknown setting {name!r} in [tool.{tool}]; use {settings}")
        kind, types = _KINDS[known[name]]
        if not _is_of(value, types):
            raise ValueError(f"{path}: [tool.{tool}] {name} must be {kind}, got {value!r}")
    return {"": path, **table}


def _is_of(value: Any, types: tuple[type, ...]) -> bool:
    """Tell whether a value of TOML has one of these types; lists must have strings only."""
    if type(value) is dict:
        return dict in types and all(_is_of(each, (list,)) for each in value.values())
    if type(value) is list:
        return list in types and all(type(each) is str for each in value)
    return type(value) in types


def _find(folder: Path | None) -> Path | None:
    try:
        folder = (folder or Path.cwd()).absolute()
    except OSError:  # The current folder was removed.
        return None
    paths = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Path.is_file raises below a folder without permission to enter.
    return next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113


def _load(path: Path, name: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if name.encode() not in data:
        return {}  # Saves 5 ms for the parser.
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # Not TOML, or not UTF-8.
        raise ValueError(f"{path} is not valid: {error}") from None


def github_annotation(message: str, **properties: object) -> str:
    """Return the command of GitHub Actions for an error with a title or a place."""
    pairs = (f"{name}={_escape(str(value), ':,')}" for name, value in properties.items())
    return f"::error {','.join(pairs)}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)
