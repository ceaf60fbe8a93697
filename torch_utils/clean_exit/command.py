"""What to start: the program's command line and environment, with the probe loaded first."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTUP = Path(__file__).resolve().parent / "_startup"
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?$")
_WITH_VALUE = ("W", "X")  # options of the interpreter that take a value
_LONG_WITH_VALUE = ("--check-hash-based-pycs",)


def parse_command(command: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """Make a command line of what a caller gave.

    A path to a Python file, alone or as the first word, is run by this Python unless it is
    executable and says by whom; so are ``-m MODULE`` and ``-c CODE``. A string that is not a
    file's path is split as a shell does.

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
    first = words[0]
    if first.startswith(("-m", "-c")):
        if first in ("-m", "-c") and len(words) < 2:
            raise ValueError(f"{first} needs an argument")
        return [sys.executable, *words]
    if first.endswith(".py") and os.path.isfile(first):  # noqa: PTH113 - no Path before it starts
        if not _says_by_whom(first):
            return [sys.executable, *words]
        if os.sep not in first and shutil.which(first) is None:
            return [os.path.join(os.curdir, first), *words[1:]]  # noqa: PTH118
    elif first.endswith(".py") and os.sep in first and not os.access(first, os.X_OK):
        return [sys.executable, *words]  # Python says that it is not there.
    return words


def _says_by_whom(path: str) -> bool:
    """Say whether a file is executable, and has the line that names its interpreter."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return os.access(path, os.X_OK) and file.read(2) == b"#!"
    except OSError:
        return False


def add_probe(
    command: list[str], environment: Mapping[str, str], events: Path, *, unbuffered: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that make a Python program load the probe.

    Args:
        command: The program's command line.
        environment: The program's environment.
        events: Where the probe is to write to.
        unbuffered: Whether Python is not to hold back what the program prints.
    """
    changed = dict(environment)
    if unbuffered:
        changed["PYTHONUNBUFFERED"] = "1"
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
    if unbuffered:
        interpreter = [*interpreter, "-u"]
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
        position += command[position] in _LONG_WITH_VALUE
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
