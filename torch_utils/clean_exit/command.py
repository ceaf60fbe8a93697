"""What to start: the program's command line and environment, with the probe loaded first."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .processes import RUNS_VARIABLE

STARTUP = Path(__file__).resolve().parent / "_startup"
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?$")
_WITH_VALUE = ("W", "X")  # options of the interpreter that take a value


def parse_command(command: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """Make a command line of what a caller gave.

    A path to a Python file, alone or as the first word, is run by this Python; so are
    ``-m MODULE`` and ``-c CODE``. A string that is not a file's path is split as a shell does.

    Raises:
        ValueError: There is no command.
    """
    if isinstance(command, str):
        is_path = Path(command).is_file() or not any(map(str.isspace, command))
        words = [command] if is_path else shlex.split(command)
    elif isinstance(command, os.PathLike):
        words = [os.fspath(command)]
    else:
        words = [os.fspath(word) for word in command]
    if not words or not words[0]:
        raise ValueError("there is no command to run")
    if _is_script(words[0]) or words[0] in ("-m", "-c"):
        if words[0] in ("-m", "-c") and len(words) < 2:
            raise ValueError(f"{words[0]} needs an argument")
        return [sys.executable, *words]
    return words


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not os.access(word, os.X_OK)


def add_probe(
    command: list[str], environment: Mapping[str, str], events: Path, token: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that make a Python program load the probe."""
    changed = dict(environment)
    runs = changed.get(RUNS_VARIABLE)
    changed[RUNS_VARIABLE] = f"{runs},{token}" if runs else token
    changed["CLEAN_EXIT_EVENTS"] = str(events)
    # Left by a checker that this one runs under, and whose program is not Python.
    original = changed.get("PYTHONPATH")
    changed.pop("CLEAN_EXIT_PYTHONPATH", None)
    if original is not None:
        changed["CLEAN_EXIT_PYTHONPATH"] = original
    # An empty entry would be the current folder.
    changed["PYTHONPATH"] = os.pathsep.join(
        [str(STARTUP), original] if original else [str(STARTUP)]
    )
    parts = _split_isolated(command)
    if parts is None:
        return command, changed
    interpreter, program = parts
    return [*interpreter, str(STARTUP / "clean_exit_launch.py"), *program], changed


def _split_isolated(command: list[str]) -> tuple[list[str], list[str]] | None:
    """Split the command of a Python that ignores its environment (-I, -E) or site (-S).

    Returns:
        The interpreter with its options, and the program: a file, -c or -m, and arguments.
        None for all others, which load the probe through their environment.
    """
    if not _PYTHON.match(Path(command[0]).name):
        return None
    ignores = False
    position = 1
    while (
        position < len(command) and command[position].startswith("-") and command[position] != "-"
    ):
        letters = "" if command[position].startswith("--") else command[position][1:]
        for index, letter in enumerate(letters):
            if letter in "cm":
                before = [f"-{letters[:index]}"] if index else []
                joined = [letters[index + 1 :]] if letters[index + 1 :] else []
                program = [f"-{letter}", *joined, *command[position + 1 :]]
                return ([*command[:position], *before], program) if ignores else None
            if letter in _WITH_VALUE:
                position += index == len(letters) - 1
                break
            ignores = ignores or letter in "IES"
        position += 1
    if not ignores or position >= len(command) or command[position] == "-":
        return None
    return command[:position], command[position:]
