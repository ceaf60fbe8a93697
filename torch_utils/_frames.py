"""Frames: the variables of a running function, and whether one has ended; nothing is changed.

`frame.f_locals` is no mere question in Python below 3.13: it writes into the dictionary that
`locals()` returned, keeps alive what it copied, and takes the place of what a debugger has
changed. So the variables are read where the interpreter has them: through the proxy of 3.13,
``PyFrame_GetVar`` of 3.12, and from memory in 3.10 and 3.11, whose layout is fixed and checked
once before it is used. Anywhere else (another implementation, a debug build, a program that has
not loaded ctypes) variables of running functions cannot be read, and are not.
"""

from __future__ import annotations

import functools
import gc
import sys
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_OPTIMIZED
from types import CellType, CodeType, FrameType
from typing import Any, NamedTuple

from torch_utils._runtime import DEBUG, log

Variables = list[tuple[str, Any]]

_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_VERSION = sys.version_info[:2]
# No free threads, no debug build, eight bytes a word: where the layouts below hold.
_IS_CPYTHON = (
    sys.implementation.name == "cpython"
    and sys.maxsize == 2**63 - 1
    and not hasattr(sys, "gettotalrefcount")
    and getattr(sys, "_is_gil_enabled", lambda: True)()
)
_WORD = 8


class _Layout(NamedTuple):
    """Where a frame keeps what, in words."""

    indirect: int | None  # where a frame object points to the interpreter's frame, if apart
    code: int
    variables: int
    generator: int | None  # where a frame object points to the generator that is not over


_LAYOUTS = {
    (3, 10): _Layout(None, 4, 44, 11),  # Include/cpython/frameobject.h
    (3, 11): _Layout(3, 4, 9, None),  # Include/internal/pycore_frame.h
}


def variables_of(frame: FrameType) -> Variables:
    """List a function's variables that have a value, those of its closure too.

    Empty for the frames of modules and classes, and where they cannot be read. Runs nothing of
    the program, and changes nothing of it, whichever thread the frame belongs to.
    """
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return []
    if _VERSION >= (3, 13):
        return [(n, v) for n, v in list(frame.f_locals.items()) if type(n) is str]
    ctypes = sys.modules.get("ctypes")  # It comes with torch; it is not imported for this.
    if ctypes is None or not _IS_CPYTHON:
        return []
    if _VERSION == (3, 12):
        return _ask_for_variables(frame, _get_var(ctypes))
    memory = _memory(ctypes)
    return _open_cells(memory.variables_of(frame), frame.f_code) if memory is not None else []


def _open_cells(variables: Variables, code: CodeType) -> Variables:
    """Take the values out of the cells in which closures share them."""
    shared = {*code.co_cellvars, *code.co_freevars}
    found: Variables = []
    for name, value in variables:
        if name in shared and type(value) is CellType:
            try:
                value = value.cell_contents
            except ValueError:  # It has no value yet, or no more.
                continue
        found.append((name, value))
    return found


def has_ended(frame: FrameType) -> bool:
    """Say whether a frame can be cleared without ending a generator or coroutine that lives.

    ``frame.clear()`` closes suspended ones in Python below 3.13. True for functions: there
    Python itself refuses while they run. False where it cannot be known.
    """
    if not frame.f_code.co_flags & _SUSPENDABLE or _VERSION >= (3, 13):
        return True
    if _VERSION >= (3, 11) and _IS_CPYTHON:
        # A frame object refers to its code only once its frame is its own; until it has ended,
        # the frame belongs to the generator.
        return any(referent is frame.f_code for referent in gc.get_referents(frame))
    ctypes = sys.modules.get("ctypes")
    memory = _memory(ctypes) if ctypes is not None and _IS_CPYTHON else None
    return memory is not None and memory.has_ended(frame)


@functools.lru_cache(maxsize=1)
def _get_var(ctypes: Any) -> Any:
    # A prototype of our own: the functions of `ctypes.pythonapi` are shared with the program.
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)
    return kind(("PyFrame_GetVar", ctypes.pythonapi))


def _ask_for_variables(frame: FrameType, get_var: Any) -> Variables:
    found: Variables = []
    for name in _names(frame.f_code):
        try:
            found.append((name, get_var(frame, name)))
        except NameError:  # It has no value yet, or no more.
            continue
    return found


def _names(code: CodeType) -> list[str]:
    """List a function's variables in the order in which a frame has them."""
    cells = code.co_cellvars
    if _VERSION >= (3, 11):  # An argument that a closure uses has one place, not two.
        cells = tuple(name for name in cells if name not in code.co_varnames)
    return [*code.co_varnames, *cells, *code.co_freevars]


@functools.lru_cache(maxsize=1)
def _memory(ctypes: Any) -> _Memory | None:
    layout = _LAYOUTS.get(_VERSION)
    memory = _Memory(ctypes, layout) if layout is not None else None
    if memory is None or not memory.is_understood():
        log(DEBUG, "variables of running functions cannot be read in this Python")
        return None
    return memory


class _Memory:
    """The frames of one Python version, as they lie in memory."""

    def __init__(self, ctypes: Any, layout: _Layout) -> None:
        # All memory as one array: reading an entry is one instruction, between whose parts no
        # other thread can run, so that a frame cannot end and move meanwhile.
        self._words = (ctypes.c_size_t * (2**59)).from_address(0)
        self._objects = (ctypes.py_object * (2**59)).from_address(0)
        self._layout = layout

    def is_understood(self) -> bool:
        """Check the layout with a frame whose variables are known."""
        captured = object()

        def known(argument: object, is_bound: bool) -> Variables:
            own = [argument]
            if is_bound:
                unbound = own
                return [("unbound", unbound)]
            later = (captured, lambda: own)
            return self.variables_of(sys._getframe()) if later else []

        argument = object()
        found = dict(known(argument, False))
        cell, own = found.get("captured"), found.get("own")
        return (
            sorted(found) == ["argument", "captured", "is_bound", "later", "own", "self"]
            and found["argument"] is argument
            and type(cell) is CellType
            and cell.cell_contents is captured
            and type(own) is CellType
            and own.cell_contents == [argument]
        )

    def variables_of(self, frame: FrameType) -> Variables:
        """List the variables; those that closures share come as cells."""
        words, objects, code = self._words, self._objects, frame.f_code
        indirect, code_at, first, _ = self._layout
        here = id(frame) // _WORD
        found: Variables = []
        for place, name in enumerate(_names(code), start=first):
            try:
                # Each in one expression without a call: see `__init__`.
                if indirect is None:
                    if words[here + code_at] == id(code):
                        found.append((name, objects[here + place]))
                elif words[words[here + indirect] // _WORD + code_at] == id(code):
                    found.append((name, objects[words[here + indirect] // _WORD + place]))
            except ValueError:  # It has no value yet, or no more.
                continue
        return found

    def has_ended(self, frame: FrameType) -> bool:
        """Say whether a generator's frame belongs to no generator any more."""
        generator = self._layout.generator
        return generator is not None and self._words[id(frame) // _WORD + generator] == 0
