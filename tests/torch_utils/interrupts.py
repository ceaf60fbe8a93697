"""Interrupt a program at each instruction of some code, one run for each."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """What is raised; of a class of its own, to tell it from a real Ctrl-C."""


def interrupt() -> None:
    raise Interrupt


def run_interrupted(
    program: Callable[[], Any],
    number: int,
    *files: str,
    handler: Callable[[], Any] = interrupt,
    calls_only: bool = False,
) -> tuple[bool, bool]:
    """Run a program, and interrupt it at the given event in files with these in their names.

    By a `KeyboardInterrupt`, or by another handler of a signal, which is called there.
    Events are calls, lines, instructions and returns, but those between the end of a ``with``
    block's body and the call of ``__exit__``: CPython looks for signals at calls, backward jumps
    and the begin of functions alone, so that none can come there. Or only the calls of functions,
    where every version looks. Says whether there were that many, and whether the interrupt came
    out of the program.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not any(file in frame.f_code.co_filename for file in files):
            return None
        frame.f_trace_opcodes = not calls_only
        if calls_only:
            counts = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        else:
            counts = event != "exception" and frame.f_lasti not in _leaving_with(frame.f_code)
        if counts:
            left -= 1
            if left == 0:
                handler()
        return trace

    arrived = False
    before = sys.gettrace()
    # A destructor that the collector happens to run here would swallow the interrupt.
    collects = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        # An error that is raised before POP_EXCEPT leaves the one handled there in the thread's
        # state (CPython 3.11), as the context of all later ones. A generator has its own state.
        next(_apart(program), None)
    except Interrupt:
        arrived = True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return left <= 0, arrived


@functools.cache
def _leaving_with(code: CodeType) -> frozenset[int]:
    """Find the instructions that put three times None on the stack, for ``__exit__``.

    And those before them that only move what is there.
    """
    found: set[int] = set()
    moving: list[int] = []
    nones = 0
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("SWAP", "ROT_TWO", "NOP", "POP_BLOCK") and not nones:
            moving.append(instruction.offset)
        elif (name == "LOAD_CONST" and instruction.argval is None) or (nones and name == "DUP_TOP"):
            moving.append(instruction.offset)
            nones += 1
        elif name == "PRECALL" and nones:
            moving.append(instruction.offset)
        elif name not in ("CACHE", "EXTENDED_ARG"):
            if nones == 3 and "CALL" in name:
                found.update(moving, [instruction.offset])
            moving, nones = [], 0
    return frozenset(found)


def _apart(program: Callable[[], Any]) -> Iterator[None]:
    program()
    yield


def everywhere(check: Callable[[int], bool], step: int = 1) -> int:
    """Call with 1, 1 + step and so on, until the program had fewer events; says how many it had."""
    number = 1
    while check(number):
        number += step
    return number
