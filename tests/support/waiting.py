"""Whether another process runs, and waiting for what comes about by itself."""

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.programs import TIMEOUT_S


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended does not, though nobody has waited for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" or int(fields[17]) > 1  # Its first thread may have ended alone.


def wait_for(what: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline, f"not so after {TIMEOUT_S} s: {_source(what)}"
        time.sleep(0.01)


async def wait_for_async(what: Callable[[], object]) -> None:
    """Wait until a function or a coroutine function returns something true."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = what()
        if await result if inspect.isawaitable(result) else result:
            return
        assert time.monotonic() < deadline, f"not so after {TIMEOUT_S} s: {_source(what)}"
        await asyncio.sleep(0.005)


def _source(what: Callable[[], object]) -> str:
    """Return the lines of a lambda, or the name of another function."""
    if getattr(what, "__name__", "") == "<lambda>":
        try:
            return inspect.getsource(what).strip()
        except OSError:  # Of a program that has no file.
            pass
    return repr(what)
