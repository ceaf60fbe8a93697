"""Interrupt a program at each instruction of some code, one run for each."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
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
    Events are calls, lines, instructions and returns; or only the calls of functions, where Python
    looks for signals in every version. Says whether there were that many, and whether the interrupt
    came out of the program.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not any(file in frame.f_code.co_filename for file in files):
            return None
        frame.f_trace_opcodes = not calls_only
        is_function = not frame.f_code.co_flags & inspect.CO_GENERATOR
        if (event == "call" and is_function) if calls_only else event != "exception":
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
        if not calls_only:
            _restore_torch()
    return left <= 0, arrived


def _restore_torch() -> None:
    """Switch torch's functions on again.

    An instruction between the end of a block and the call of ``__exit__`` is none at which Python
    looks for signals, but this interrupts it, and so leaves torch's guard as it is.
    """
    bindings = getattr(sys.modules.get("torch"), "_C", None)
    if hasattr(bindings, "_set_torch_function_state"):
        bindings._set_torch_function_state(bindings._TorchFunctionState.ENABLED)


def _apart(program: Callable[[], Any]) -> Iterator[None]:
    program()
    yield


def everywhere(check: Callable[[int], bool], step: int = 1) -> int:
    """Call with 1, 1 + step and so on, until the program had fewer events; says how many it had."""
    number = 1
    while check(number):
        number += step
    return number
