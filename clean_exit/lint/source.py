"""One file of Python: its bytes, its lines, its syntax tree. Nothing of it is run."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

STDIN = "-"


class UnreadableError(Exception):
    """A file that cannot be parsed, with the line where that was noticed, or 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(eq=False)
class Source:
    """A parsed file; `path` is written as it was given."""

    path: str
    data: bytes
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        """The lines without their ends, counted as Python counts them."""
        return decode(self.data).replace("\r\n", "\n").replace("\r", "\n").split("\n")

    def line(self, number: int) -> str:
        """Return a line, from 1; empty where the file has none such."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def column(self, line: int, offset: int) -> int:
        """Turn an offset of the syntax tree, in bytes of UTF-8, into a column from 1."""
        start = self.line(line).encode("utf-8", "surrogatepass")[:offset]
        return len(start.decode("utf-8", "replace")) + 1


def decode(data: bytes) -> str:
    """Return the text in the encoding that its first lines name."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("utf-8", "replace")


def parse(path: str, data: bytes) -> Source:
    """Parse a file.

    Raises:
        UnreadableError: It is not Python as this interpreter knows it, or nested too deeply.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Its invalid escapes are another tool's business.
            return Source(path, data, ast.parse(data, filename=path))
    except SyntaxError as error:
        raise UnreadableError(f"not parsed: {error.msg}", error.lineno or 0) from None
    except (ValueError, LookupError) as error:
        raise UnreadableError(f"not parsed: {error}") from None
    except (RecursionError, MemoryError):
        raise UnreadableError("not parsed: it is nested too deeply for this Python") from None


def read(path: Path | str) -> bytes:
    """Return the bytes of a file, or of what is piped in for ``-``.

    Raises:
        UnreadableError: It cannot be read; the message has the system's reason.
    """
    try:
        if path == STDIN:
            return sys.stdin.buffer.read() if sys.stdin else b""
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableError(f"not read: {error.strerror or error}") from None


_IGNORE = re.compile(r"\bclean-exit-lint\s*:\s*ignore\b\s*(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class Ignore:
    """A comment that hides findings of its line: of some rules, or, with none named, of all."""

    line: int
    column: int
    rules: tuple[str, ...]


def ignores(source: Source) -> list[Ignore]:
    """Return the ignore comments of a file; what only looks like one in a string is none."""
    if b"clean-exit-lint" not in source.data:
        return []
    found = []
    text = "\n".join(source.lines)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                names = tuple(name.strip() for name in (match[1] or "").split(",") if name.strip())
                found.append(Ignore(token.start[0], token.start[1] + match.start() + 1, names))
    except (tokenize.TokenError, SyntaxError):
        pass  # It was parsed, so what the tokenizer dislikes is at its end: a missing newline.
    return found
