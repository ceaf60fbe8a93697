"""Whether another process runs, and waiting for what comes about by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from support.programs import TIMEOUT_S


def is_there(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
