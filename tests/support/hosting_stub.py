"""A model for the tests of hosts, and what many of them need."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ClassVar

from tests.support.programs import TIMEOUT_S


class Stub:
    """Notes its life, and fails if it is used after it was closed."""

    made: ClassVar[list[Stub]] = []

    def __init__(self) -> None:
        self.closed = 0
        type(self).made.append(self)

    def use(self) -> int:
        assert not self.closed
        return 1

    def close(self) -> None:
        self.closed += 1


def threads_inside(package: str) -> int:
    """Count the threads that execute something of a package, or wait in it; not its own threads."""
    count = 0
    own = {each.ident for each in threading.enumerate() if each.name.startswith(f"{package}-")}
    for ident, innermost in sys._current_frames().items():  # noqa: SLF001  (of CPython)
        frame: FrameType | None = None if ident in own else innermost
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] != package:
            frame = frame.f_back
        count += frame is not None
    return count


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
