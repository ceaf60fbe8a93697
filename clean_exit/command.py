"""The program's command line, and its environment with the probe."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STARTUP = Path(__file__).resolve().parent / "_startup"
# These plugins of pytest catch the errors of destructors and threads, and turn them into warnings.
_PYTEST_OPTIONS = "-p no:unraisableexception -p no:threadexception"


def parse_command(
    command: str | os.PathLike[str] | Sequence[str], cwd: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the words of a command.

    This Python runs ``-m MODULE``, ``-c CODE``, and a Python file unless it is executable and
    names its interpreter. A string that is not the path of a file is split as in a shell.

    Args:
        command: A list of words, a command line, or the path of a Python file.
        cwd: The current folder of the program.

    Raises:
        TypeError: The command is not a list of words, a string or a path.
        ValueError: The command is empty.
    """
    folder = os.fspath(cwd or "")
    if isinstance(command, str):
        is_file = os.path.isfile(os.path.join(folder, command))
        is_path = is_file or not any(map(str.isspace, command))
        words = [command] if is_path else shlex.split(command)
    elif isinstance(command, os.PathLike):
        words = [os.fspath(command)]
    else:
        if isinstance(command, bytes) or not isinstance(command, Iterable):
            raise TypeError(f"command must be a list of words, a string or a path, got {command!r}")
        words = [os.fsdecode(word) for word in command]
    if not words or not words[0]:
        raise ValueError("there is no command to run")
    first = words[0]
    if first.startswith(("-m", "-c")):
        return [sys.executable, *words]
    path = os.path.join(folder, first)
    if first.endswith(".py") and os.path.isfile(path) and not _names_interpreter(Path(path)):
        return [sys.executable, *words]
    if first.endswith(".py") and os.sep not in first and os.path.isfile(path):
        return [os.path.join(os.curdir, first), *words[1:]]  # Do not search PATH for it.
    return words


def _names_interpreter(path: Path) -> bool:
    """Whether a file is executable and begins with ``#!``."""
    try:
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) == b"#!"
    except OSError:
        return False


def add_probe(
    environment: Mapping[str, str],
    folder: str,
    max_shutdown_s: float,
    *,
    unbuffered: bool = False,
    resource_warnings: bool = False,
) -> dict[str, str]:
    """Return an environment in which Python programs load the probe.

    Args:
        environment: The program's environment.
        folder: The folder of the probe's record.
        max_shutdown_s: The time after which the probe records the stacks of a shutdown.
        unbuffered: Whether Python must not buffer the program's output.
        resource_warnings: Whether Python must print ResourceWarnings.
    """
    events = os.path.join(folder, "events")
    changed = {**environment, "CLEAN_EXIT_EVENTS": f"{max_shutdown_s}:{events}"}
    if "PYTEST_CURRENT_TEST" in changed:  # That test runs this check, not the program.
        changed["CLEAN_EXIT_TEST"] = changed["PYTEST_CURRENT_TEST"]
    if unbuffered:
        changed["PYTHONUNBUFFERED"] = "1"
    earlier = changed.get("PYTHONPATH")  # "" means no entry, but an empty entry is a folder.
    path = [p for p in earlier.split(os.pathsep) if p != str(STARTUP)] if earlier else []
    changed["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *path])
    own = _PYTEST_OPTIONS
    if resource_warnings:
        earlier = changed.get("PYTHONWARNINGS")
        added = "default::ResourceWarning"
        changed["PYTHONWARNINGS"] = f"{earlier},{added}" if earlier else added
        # pytest only lists warnings; it cannot list these.
        own += " -W error::ResourceWarning -W error:coroutine:RuntimeWarning"
    # First, so that the user's options win: -p unraisableexception loads the plugin again.
    options = changed.get("PYTEST_ADDOPTS", "").removeprefix(_PYTEST_OPTIONS).lstrip()
    changed["PYTEST_ADDOPTS"] = f"{own} {options}".rstrip()
    return changed
