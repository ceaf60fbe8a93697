"""fast_exit: the same exit, sooner. Each test runs with it and, as the control, without."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import run, run_forked

FAST = "from torch_utils import fast_exit\nassert fast_exit() and not fast_exit()\n"
PLAIN = "import torch_utils\n"
LATE = "import atexit; LATE = []; atexit.register(lambda: [late() for late in LATE])\n"
DESTRUCTOR = """
class D:
    def __init__(self, name): self.name = name
    def __del__(self): print("destructor", self.name, flush=True)
"""
PROGRAMS = {
    "exit code": "import sys; sys.exit(7)",
    "unhandled exception": "1 / 0",
    "unflushed stdout": "import sys; sys.stdout.write('no newline, no flush')",
    "thread": "import threading; threading.Thread(target=print, args=['thread']).start()",
    "destructor": DESTRUCTOR + "d = D('global')",
    "destructor in a cycle": DESTRUCTOR + "c = []; c.append(c); c.append(D('behind'))",
    "destructor in a class": DESTRUCTOR + "class Service: instance = D('attribute')",
    "destructor in a thread-local": DESTRUCTOR
    + "import threading; here = threading.local(); here.d = D('local'); here.d.me = here.d",
    "destructor made by a late callback": DESTRUCTOR
    + "LATE.append(lambda: globals().update(d=D('late')))",
    "suspended generator": """
def g():
    try: yield
    finally: print("generator closed")
kept = g(); next(kept)
""",
    "weak references": """
import weakref
class C: pass
c = C(); c.me = c; d = C(); d.me = d
weakref.finalize(c, print, "finalized")
kept = weakref.ref(d, lambda _: print("called back", flush=True)); del d
""",
    "attributes that run code": """
class Nosy:
    def __getattribute__(self, name): print("asked for", name, flush=True)
kept = Nosy()
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
    fast, plain = (run(LATE + prelude + PROGRAMS[name]) for prelude in (FAST, PLAIN))
    assert (fast.returncode, fast.stdout) == (plain.returncode, plain.stdout)
    assert [line for line in fast.stderr.splitlines() if "line " not in line] == [
        line for line in plain.stderr.splitlines() if "line " not in line
    ]


WRITERS = {
    "plain": "w = open(path, 'w'); w.write(text)",
    "gzip": "import gzip; w = gzip.open(path, 'wb'); w.write(text.encode())",
    "shelve": "import shelve; w = shelve.open(path, writeback=True); w['a'] = [1]",
    "late callback": "w = open(path, 'w'); LATE.append(lambda: w.write(text))",
    "frozen by the program": "import gc; w = open(path, 'w'); w.write(text); gc.freeze()",
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_that_nobody_closes_are_the_same(name: str, tmp_path: Path) -> None:
    contents = []
    for prelude in (FAST, PLAIN):
        folder = tmp_path / str(len(contents))
        folder.mkdir()
        program = f"""
path = {str(folder / "out")!r}; text = "last words " * 50
import time; time.time = lambda: 0.0
{WRITERS[name]}
kept = [w]; kept.append(kept)
"""
        run(LATE + prelude + program)
        contents.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert contents[0] == contents[1]
    assert any(contents[1].values())


# Registered before the library: so it runs when the library has decided.
ASK = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"


@pytest.mark.parametrize(
    "program", ["", pytest.param("import torch; k = torch.nn.Linear(2, 2)", marks=pytest.mark.slow)]
)
def test_heap_is_frozen_where_nothing_needs_it(program: str) -> None:
    start = run_forked if program else run
    assert start(ASK + FAST + program).stdout == "True\n"
    assert start(ASK + PLAIN + program).stdout == "False\n"
    destructor = "\nclass D:\n  def __del__(self): pass\nd = D()\n"
    assert start(ASK + FAST + program + destructor).stdout == "False\n"
