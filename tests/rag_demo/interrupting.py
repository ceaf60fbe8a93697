"""An interrupt at every moment of a piece of work: at each line, or at each instruction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from programs import ROOT

PACKAGE = str(ROOT / "rag_demo") + "/"
TESTS = str(Path(__file__).parent) + "/"


class Interrupt(KeyboardInterrupt):
    """What stands for Ctrl-C."""


def moments(work: Callable[[], object], *, opcodes: bool, files: str = PACKAGE) -> int:
    """Count the lines or instructions of these files that work runs through."""
    count = 0

    def seen() -> None:
        nonlocal count
        count += 1

    _trace(work, seen, opcodes, files)
    return count


def interrupted(
    work: Callable[[], object], moment: int, *, opcodes: bool, files: str = PACKAGE
) -> bool:
    """Do some work, with an interrupt at one moment; say whether it came."""
    count = 0

    def seen() -> None:
        nonlocal count
        count += 1
        if count == moment + 1:
            raise Interrupt

    try:
        _trace(work, seen, opcodes, files)
    except Interrupt:
        return True
    return False


def _trace(work: Callable[[], object], seen: Callable[[], None], opcodes: bool, files: str) -> None:
    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == ("opcode" if opcodes else "line"):
            seen()
        return local

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = opcodes
        frame.f_trace_lines = not opcodes
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        work()
    finally:
        sys.settrace(before)


def chosen(count: int, most: int) -> Iterator[int]:
    """Yield moments, evenly; all of them, if they are no more than ``most``."""
    step = max(1, -(-count // most))
    yield from range(0, count, step)
