"""What a model's process is started with: its command, its descriptors; and how it has ended.

Where the program has closed its standard descriptors, new ones get their numbers, and would be
taken for them: by the other process, which has its own there, and by whatever writes to stderr
here. So all of them are moved out of the way.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

__all__ = [
    "above",
    "command",
    "describe",
    "enlarge",
    "journal",
    "pair",
    "parents_stderr",
    "pipe",
]

_PIPE_BYTES = 1 << 20  # for what it says while nobody reads: as large as the system allows
_START = "import sys; sys.path[:] = {}; from torch_utils.hosting.child import serve; serve({})"


def command(numbers: Sequence[int]) -> list[str]:
    """Return what runs `torch_utils.hosting.child.serve` with these descriptors."""
    # Private, but what multiprocessing uses as well: -W, -X and the like.
    options: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return [sys.executable, *options, "-c", _START.format(path, ", ".join(map(str, numbers)))]


def above(descriptor: int) -> int:
    """Return the descriptor, or another in its place if it has a standard one's number."""
    if descriptor > 2:
        return descriptor
    import fcntl

    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def pipe() -> tuple[int, int]:
    """Return the two ends of a pipe."""
    read, write = os.pipe()
    return above(read), above(write)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    one, other = socket.socketpair()
    return _moved(one), _moved(other)


def _moved(one: socket.socket) -> socket.socket:
    return one if one.fileno() > 2 else socket.socket(fileno=above(one.detach()))


def journal() -> int:
    """Return a file without a name, for the last words."""
    with tempfile.TemporaryFile(buffering=0) as file:
        return above(os.dup(file.fileno()))


def enlarge(pipe: int) -> None:
    """Let a pipe hold more, if the system does."""
    try:
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return  # Not Linux, or less is allowed.


def parents_stderr() -> int:
    """Return a descriptor of this process's stderr, or of nothing where it is closed."""
    try:
        return above(os.dup(2))
    except OSError:
        return above(os.open(os.devnull, os.O_WRONLY))


def describe(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"signal {-code} ({name}){hint}"
