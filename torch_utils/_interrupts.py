"""Exactly once, although an interrupt may come between any two instructions.

KeyboardInterrupt, and whatever a signal handler raises, can come anywhere: after a function was
chosen and before it is called, for one. Whether the program's own code has run must therefore
not be noted before the call, nor after it, but by the call: ``for _ in map(function, [owner])``
takes the owner and calls the function in one step of C. A map that is exhausted has called; one
that is not can be gone on with. What remains is an interrupt at the callee's first instruction.
"""

from __future__ import annotations

from _thread import interrupt_main
from functools import partial
from itertools import starmap
from opcode import opmap
from weakref import ref

from torch_utils._runtime import MODULES, PHASE, early_bound

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any


_RAISES = (opmap["RAISE_VARARGS"], opmap["RERAISE"])
_RESUME, _NOP = opmap.get("RESUME"), opmap["NOP"]


@early_bound
def _is_start(code: CodeType, offset: int) -> bool:
    if offset <= 0:
        return True  # Python 3.10 has no instruction that only marks the start.
    if _RESUME is None:
        return False
    instructions = code.co_code
    at, before = instructions[offset], instructions[offset - 2]
    # The argument tells the start from what follows a yield; ``try:`` is an instruction, too.
    return (at == _RESUME and instructions[offset + 1] == 0) or (
        at == _NOP and before == _RESUME and instructions[offset - 1] == 0
    )


@early_bound
def never_began(error: BaseException) -> bool:
    """Say whether an interrupt came before the first instruction of the function that was called.

    Asked by whoever called it, about what it caught. The interpreter looks for signals when it
    enters a function, so this is where most interrupts of a short function come.
    """
    here = error.__traceback__
    callee = None if here is None else here.tb_next
    if isinstance(error, Exception) or callee is None:
        return False
    return _is_start(callee.tb_frame.f_code, callee.tb_lasti)


@early_bound
def came_out_of(function: Callable[..., Any], error: BaseException) -> bool:
    """Say whether what a caller of this function caught came out of that, or only beside it.

    A signal handler that raises has a frame of its own, between the instructions of the caller.
    """
    here = error.__traceback__
    callee = None if here is None else here.tb_next
    code = getattr(function, "__code__", None)
    return isinstance(error, Exception) or (
        callee is not None and (code is None or callee.tb_frame.f_code is code)
    )


class _Late:
    """At its end, has the main thread interrupted."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self) -> None:
        # All in C: a function of Python's would be the first to be interrupted.
        self._end = ref(self, partial(next, starmap(interrupt_main, [()])))


@early_bound
def again_afterwards(error: BaseException) -> object:
    """Have a Ctrl-C that came into a destructor come again when that has returned.

    A destructor can pass nothing on: what gets out of it is printed, and the program runs on.
    What the program itself has raised is not that.

    Returns:
        What the destructor keeps in a variable: its end is the signal.
    """
    threading, here = MODULES.get("threading"), error.__traceback__
    if type(error) is not KeyboardInterrupt or PHASE.exiting or here is None:
        return None
    if threading is not None and threading.current_thread() is not threading.main_thread():
        return None
    while here.tb_next is not None:
        here = here.tb_next
    if here.tb_frame.f_code.co_code[here.tb_lasti] in _RAISES:
        return None
    return _Late()
