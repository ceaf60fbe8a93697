"""fast_exit: the same exit, sooner. Each test runs with it and, as the control, without."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs import Result, run

FAST = "from torch_utils import fast_exit\nassert fast_exit() and not fast_exit()\n"
PLAIN = "import torch_utils\n"


def both(program: str, **options: object) -> tuple[Result, Result]:
    return run(FAST + program, **options), run(PLAIN + program, **options)  # type: ignore[arg-type]


DESTRUCTOR = """
class D:
    def __init__(self, name): self.name = name
    def __del__(self): print("destructor", self.name, flush=True)
"""
PROGRAMS = {
    "exit code": "import sys; sys.exit(7)",
    "unhandled exception": "1 / 0",
    "atexit": "import atexit; atexit.register(print, 'a'); atexit.register(print, 'b')",
    "unflushed stdout": "import sys; sys.stdout.write('no newline, no flush')",
    "non-daemon thread": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
""",
    "daemon thread": """
import threading, time
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
""",
    "weakref.finalize": """
import weakref
class C: pass
c = C(); c.me = c
weakref.finalize(c, print, "finalized")
""",
    "destructor": DESTRUCTOR + "d = D('global')",
    "destructor in a cycle": DESTRUCTOR + "d = D('cycle'); d.me = d",
    "destructor behind a cycle": DESTRUCTOR + "c = []; c.append(c); c.append(D('behind'))",
    "destructor in a class": DESTRUCTOR + "class Service: instance = D('attribute')",
    "destructor in garbage": DESTRUCTOR + "d = D('garbage'); d.me = d; del d",
    "suspended generator": """
def g():
    try: yield
    finally: print("generator closed")
kept = g(); next(kept)
""",
    "resource": """
from torch_utils import Resource
class R(Resource):
    def _release(self): print("released")
r = R(); r.me = r
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_exit_is_the_same(name: str) -> None:
    """Exit code, stdout and stderr are those of the ordinary exit."""
    fast, plain = both(PROGRAMS[name])
    assert (fast.returncode, fast.stdout) == (plain.returncode, plain.stdout)
    assert [line for line in fast.stderr.splitlines() if "line " not in line] == [
        line for line in plain.stderr.splitlines() if "line " not in line
    ]


def test_unflushed_file_in_a_cycle(tmp_path: Path) -> None:
    """What a program has written is written, also by a file that nobody closes."""
    path = tmp_path / "out.txt"
    program = f"""
class Log:
    def __init__(self): self.file = open({str(path)!r}, "w"); self.me = self
log = Log(); log.file.write("last words")
"""
    for prelude in (FAST, PLAIN):
        path.unlink(missing_ok=True)
        run(prelude + program)
        assert path.read_text() == "last words"


def test_heap_is_frozen_where_nothing_needs_it() -> None:
    """The heap is frozen by the end, unless the program's own modules hold a destructor."""
    ask = """
import gc, sys
class Last:
    def __del__(self, count=gc.get_freeze_count, out=sys.__stdout__):
        out.write(f"{count() > 0}"); out.flush()
sys.kept = Last()
"""
    cycle = DESTRUCTOR + "d = D('x'); d.me = d\n"
    assert run(FAST + ask).stdout == "True"
    assert run(PLAIN + ask).stdout == "False"
    assert "False" in run(FAST + ask + cycle).stdout
