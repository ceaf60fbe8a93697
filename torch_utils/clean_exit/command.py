"""What to start: the program's command line and environment, with the probe loaded first."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
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
        TypeError: It is none of these.
        ValueError: There is no command.
    """
    if isinstance(command, str):
        is_path = Path(command).is_file() or not any(map(str.isspace, command))
        words = [command] if is_path else shlex.split(command)
    elif isinstance(command, os.PathLike):
        words = [os.fspath(command)]
    else:
        if isinstance(command, bytes) or not isinstance(command, Iterable):
            raise TypeError(f"a command is a list of words, a string or a path, not {command!r}")
        words = [os.fsdecode(word) for word in command]
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
    command: list[str],
    environment: Mapping[str, str],
    events: Path,
    *,
    cwd: str | os.PathLike[str] | None = None,
    unbuffered: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that make a Python program load the probe.

    Args:
        command: The program's command line.
        environment: The program's environment.
        events: Where the probe is to write to.
        cwd: The folder that the program starts in.
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
    if not _can_be_launched(program, cwd):
        return command, changed  # Python itself says what is wrong with it.
    if unbuffered:
        interpreter = [*interpreter, "-u"]
    return [*interpreter, str(STARTUP / "clean_exit_launch.py"), *program], changed


def _split_isolated(command: list[str]) -> tuple[list[str], list[str]] | None:
    """Split the command of a Python that ignores its environment (-I, -E) or site (-S).

    Returns:
        The interpreter with its options, and the program: a file, -c or -m, and arguments.
        None for all others, which load the probe through their environment. To skip a first line
        (-x) is the launcher's then, which gets it before the program.
    """
    if not _PYTHON.match(Path(command[0]).name):
        return None
    ignores = skips = False
    interpreter, rest = command[:1], command[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word, rest = rest[0], rest[1:]
        if word.startswith("--"):
            values = 1 if word in _LONG_WITH_VALUE else 0
            interpreter, rest = [*interpreter, word, *rest[:values]], rest[values:]
            continue
        letters, kept = word[1:], ""
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cm":
                interpreter += [f"-{kept}"] if kept else []
                program = [f"-{letter}", *([letters] if letters else []), *rest]
                return (interpreter, program) if ignores and len(program) > 1 else None
            if letter == "x":
                skips = True
                continue
            kept += letter
            ignores = ignores or letter in "IES"
            if letter in _WITH_VALUE:
                if letters:
                    kept, letters = kept + letters, ""
                else:
                    interpreter, rest = [*interpreter, f"-{kept}", *rest[:1]], rest[1:]
                    kept = ""
        interpreter += [f"-{kept}"] if kept else []
    if not ignores or not rest or rest[0] == "-":
        return None
    return interpreter, ["-x", *rest] if skips else rest


def _can_be_launched(program: Sequence[str], cwd: str | os.PathLike[str] | None) -> bool:
    words = program[1:] if program[0] == "-x" else program
    path = Path(cwd or os.curdir, words[0])
    return words[0] in ("-c", "-m") or os.access(path, os.R_OK)
