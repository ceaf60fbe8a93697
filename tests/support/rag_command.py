"""Run the command `rag-demo` in this process, and read back what an index holds."""

import contextlib
import io
import json
import os
import pty
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rag_demo.cli import main
from tests.support.programs import Result

IMPORT_MAIN = "from rag_demo.cli import main"
"""For programs that are started elsewhere: makes `main()` the command, with `sys.argv`."""


class Terminal(io.TextIOWrapper):
    """A standard output that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def rag_demo(*arguments: str | Path, stdin: str = "", stdout: Any = io.TextIOWrapper) -> Result:
    """Run a command as a shell would, but for the interpreter of its own."""
    given = list(map(str, arguments))
    raw: Any = io.BytesIO(stdin.encode())
    text = io.TextIOWrapper(io.BufferedReader(raw))
    streams = [kind(io.BytesIO(), "utf-8") for kind in (stdout, io.TextIOWrapper)]
    before = sys.argv, sys.stdin
    code: Any = 0
    try:
        sys.argv, sys.stdin = ["rag-demo", *given], text
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.stdin = before
    shown = []
    for stream in streams:
        stream.flush()
        shown.append(stream.buffer.getvalue().decode())
    return Result(["rag-demo", *given], code, *shown)


def succeed(*arguments: str | Path, stdin: str = "", stdout: Any = io.TextIOWrapper) -> str:
    """Run a command that must succeed; return what it prints."""
    result = rag_demo(*arguments, stdin=stdin, stdout=stdout)
    assert result.returncode == 0, str(result)
    return result.stdout


def fail(*arguments: str | Path, stdin: str = "") -> str:
    """Run a command that must fail as documented; return its one line without the beginning."""
    result = rag_demo(*arguments, stdin=stdin)
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    assert result.stderr.startswith("rag-demo: error: "), str(result)
    assert result.stderr.count("\n") == 1, str(result)
    return result.stderr.removeprefix("rag-demo: error: ").rstrip("\n")


def search(folder: str | Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """Return the answers to each question, as `--json` prints them."""
    lines = succeed("search", folder, *arguments, "--json").splitlines()
    return [json.loads(line) for line in lines]


def documents(folder: str | Path, *options: str | Path) -> dict[str, dict[str, Any]]:
    """Return all documents of an index, by id.

    Scores are rounded: the question is embedded again each time, and may differ in the last bits.
    """
    (found,) = search(folder, "the", "--mode", "dense", "--top-k", "1000000", *options)
    by_id = {each["id"]: {**each, "score": round(each["score"], 4)} for each in found["results"]}
    assert len(by_id) == len(found["results"]) == info(folder)["texts"]
    return by_id


def texts(folder: str | Path, *options: str | Path) -> list[str]:
    """Return the texts of an index, sorted."""
    return sorted(each["text"] for each in documents(folder, *options).values())


def info(folder: str | Path) -> dict[str, Any]:
    """Return what `rag-demo info` says."""
    facts: dict[str, Any] = json.loads(succeed("info", folder, "--json"))
    return facts


def on_a_terminal(*command: str | Path) -> str:
    """Run `rag-demo` with a terminal as stdout and stderr, and return what it prints."""
    shown: list[bytes] = []
    child = [sys.executable, "-m", "rag_demo", *map(str, command)]

    def read(terminal: int) -> bytes:
        shown.append(os.read(terminal, 65536))
        return shown[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setattr(pty, "STDIN_FILENO", os.open(os.devnull, os.O_RDONLY))
        status = pty.spawn(child, read)
    output = b"".join(shown).decode()
    assert os.waitstatus_to_exitcode(status) == 0, output
    return output


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path
