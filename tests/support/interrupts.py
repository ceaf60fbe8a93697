"""Interrupt a program at the instructions that it executes in a package.

    def check(place):
        resource = Counted()
        place.run(resource.close)
        resource.close()
        assert resource.released == 1

    interrupt_everywhere(check, package="torch_utils", minimum=50)

`check` is called once without an interrupt, to count the places, and then once for each place.
The package is known by the names of its modules, so the test still holds when files move.
"""

import ast
import dis
import functools
import gc
import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """What `raise_interrupt` raises; a class of its own, to tell it from a real Ctrl-C."""


def raise_interrupt() -> None:
    """Raise an exception at the place itself, whatever the signal handlers are."""
    raise Interrupt


def send_sigint() -> None:
    """Send a real SIGINT to this process; its handler decides what happens."""
    signal.raise_signal(signal.SIGINT)


class Place:
    """One place of a program, and what happened when the program was interrupted there.

    Attributes:
        number: Which of the executed instructions it is, from 1; 0 for a run without interrupt.
        delivered: Whether the program came this far, so that it was interrupted.
        propagated: Whether the interrupt came out of the program.
        where: The module, function and line that were interrupted.
    """

    def __init__(self, number: int, package: str, deliver: Callable[[], object]) -> None:
        self.number = number
        self.delivered = False
        self.propagated = False
        self.where = "nowhere"
        self.executed = 0
        self._package = package
        self._deliver = deliver

    def __repr__(self) -> str:
        return f"<place {self.number}: {self.where}>"

    def run(self, program: Callable[[], object]) -> None:
        """Run the program, and interrupt it here; only the interrupt itself is caught."""
        before, collects = sys.gettrace(), gc.isenabled()
        # A destructor that the collector happens to run here would swallow the interrupt.
        gc.disable()
        sys.settrace(self._trace)
        try:
            # A generator has an exception state of its own: an interrupt in the middle of an
            # `except` clause would otherwise leave that exception behind in the test (3.11).
            next(_as_generator(program), None)
        except KeyboardInterrupt:
            if not self.delivered:
                raise
            self.propagated = True
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        module = frame.f_globals.get("__name__") or ""
        if module != self._package and not module.startswith(f"{self._package}."):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        if event == "opcode" and frame.f_lineno not in _lines_without_signals(code.co_filename):
            self.executed += 1
            is_due = self.number and self.executed >= self.number and not self.delivered
            # CPython looks for signals at no NOP; a loop at the end of a `with` has one there.
            at_nop = code.co_code[frame.f_lasti] == dis.opmap["NOP"]
            # CPython prints what is raised in a destructor and goes on: no code can pass it on.
            if is_due and not at_nop and not _is_in_destructor(frame):
                self.delivered = True
                self.where = f"{module}, {code.co_name}, line {frame.f_lineno}"
                self._deliver()
        return self._trace


def interrupt_everywhere(
    check: Callable[[Place], object],
    *,
    package: str,
    minimum: int,
    at_most: int | None = None,
    deliver: Callable[[], object] = raise_interrupt,
) -> int:
    """Call a check for the places where a program can be interrupted; return how many there were.

    Args:
        check: Sets the program up, calls `Place.run` with it once, and asserts what must hold.
        package: Import name of the package whose instructions count.
        minimum: Fail if the program was interrupted in fewer places.
        at_most: Interrupt at each Nth instruction only, so that there are no more places than this.
        deliver: What happens there: `raise_interrupt`, `send_sigint`, or any function.
    """

    def attempt(number: int) -> Place:
        place = Place(number, package, deliver)
        try:
            check(place)
        except BaseException as error:
            error.add_note(f"interrupted at {place}")
            raise
        return place

    assert minimum > 0, "a test that interrupts nothing proves nothing"
    executed = attempt(0).executed
    if sys.version_info >= (3, 12):
        # There, the first traces get opcode events of the outer functions only, or none.
        while (more := attempt(0).executed) > executed:
            executed = more
    every = 1 if at_most is None else max(1, -(-executed // at_most))
    interrupted = sum(attempt(number).delivered for number in range(1, executed + 1, every))
    assert interrupted >= minimum, (
        f"{interrupted} places of {package} were interrupted, of {executed}, not {minimum}"
    )
    return interrupted


def _is_in_destructor(frame: FrameType | None) -> bool:
    """Say whether a frame is a destructor's, or was called by one."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@functools.cache
def _lines_without_signals(filename: str) -> frozenset[int]:
    """Find the lines of `with` statements and of `try:`, where no interrupt is placed.

    The instructions between the end of a block and the call of `__exit__` have the line of the
    `with` statement, and CPython never looks for signals there. Those that enter the block are on
    the same line and are left out too.
    """
    tree = ast.parse("".join(linecache.getlines(filename)))
    return frozenset(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith | ast.Try)
    )


def _as_generator(program: Callable[[], object]) -> Iterator[None]:
    program()
    yield
