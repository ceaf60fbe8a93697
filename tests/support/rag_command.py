"""Run the command `rag-demo` in this process, and read back what an index holds."""

import contextlib
import io
import json
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


def rag_demo(*arguments: str | Path, stdin: str = "", on_terminal: bool = False) -> Result:
    """Run a command as a shell would, but for the interpreter of its own."""
    command = ["rag-demo", *map(str, arguments)]
    kind = Terminal if on_terminal else io.TextIOWrapper
    streams = [kind(io.BytesIO(), "utf-8") for _ in range(2)]
    raw: Any = io.BytesIO(stdin.encode())
    code: Any = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    shown = []
    for stream in streams:
        stream.seek(0)
        shown.append(stream.read())
    return Result(command, code, *shown)


def succeed(*arguments: str | Path, **options: Any) -> str:
    """Run a command that must succeed, with the options of `rag_demo`; return what it prints."""
    result = rag_demo(*arguments, **options)
    assert result.returncode == 0, str(result)
    return result.stdout


def fail(*arguments: str | Path) -> str:
    """Run a command that must fail as documented; return its one line without the beginning."""
    result = rag_demo(*arguments)
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


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path
