"""One row of the matrix: a program, and how it has to end.

Each program runs with ``make``, ``close``, ``is_alive`` and ``log`` of `subjects`, and says
``x`` for the object. What it makes must be released exactly once, in the process that made it,
with nothing on stderr, unless the row says otherwise.
"""

import textwrap
from dataclasses import dataclass

ALL = ("resource", "scope", "host", "retriever")
LIGHT = ALL[:3]  # They import no torch.

TRACEBACK = r"Traceback \(most recent call last\):\n(  .*\n)+{}\n"
# An error of a release has no caller at exit: `sys.unraisablehook` prints it, or a scope's log.
LOUD = r"(Exception ignored (in:|while) .*|releasing .* failed: .*)\n" + TRACEBACK


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: What the hazard is.
        block: Python source, indented as it pleases.
        returncode: How it must end.
        stderr: A pattern that stderr must match as a whole; empty means that it is empty.
        released: How often each object must be released: 0 where nothing can be caught.
        needs_torch: Whether it needs torch whatever the subject is.
        options: Options of the interpreter. A program with options has a process of its own
            from the start, as have those that need ``own_process``.
        subjects: Which subjects it makes sense for.
        late: Whether the program itself imports the library, later than the subjects would.
        control: Whether a naive destructor falls short in this program, which is tested too.
        is_variation: Whether only `make test-slow` runs it.
    """

    name: str
    block: str
    returncode: int = 0
    stderr: str = ""
    released: int = 1
    needs_torch: bool = False
    options: tuple[str, ...] = ()
    own_process: bool = False
    subjects: tuple[str, ...] = ALL
    late: bool = False
    control: bool = True
    is_variation: bool = False

    @property
    def program(self) -> str:
        return textwrap.dedent(self.block).strip("\n") + "\n"
