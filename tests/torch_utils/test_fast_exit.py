"""fast_exit: the same exit, sooner. Each test runs with it and, as the control, without."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs import Result, assert_clean, run, run_forked

FAST = "from torch_utils import fast_exit\nassert fast_exit() and not fast_exit()\n"
PLAIN = "import torch_utils\n"


def both(program: str, **options: object) -> tuple[Result, Result]:
    return run(LATE + FAST + program, **options), run(LATE + PLAIN + program, **options)  # type: ignore[arg-type]


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
    "suspended coroutine": """
import types
@types.coroutine
def pause(): yield
async def work():
    try: await pause()
    finally: print("coroutine closed")
kept = work(); kept.send(None)
""",
    "generator that was never begun": "kept = (print('never') for _ in [1])",
    "more objects than can be looked at one by one": DESTRUCTOR
    + "kept = [[i] for i in range(100_000)] + [[D('last')]]; kept.append(kept)",
    "destructor without a dictionary": """
class Blind:
    __slots__ = ()
    def __del__(self): print("blind", flush=True)
kept = [{"a": Blind()}, ((Blind(),),)]; kept.append(kept)
""",
    "destructor in sys": DESTRUCTOR + "import sys; sys.kept = D('sys'); sys.kept.me = sys.kept",
    "destructor in a context": DESTRUCTOR
    + "import contextvars; v = contextvars.ContextVar('v'); v.set(D('context')); v.get().me = v",
    "destructor in a thread-local": DESTRUCTOR
    + "import threading; here = threading.local(); here.d = D('local'); here.d.me = here.d",
    "destructor of an instance of a metaclass": """
class Meta(type):
    def __del__(self): print("class is gone", flush=True)
    def __hash__(self): print("asked for its hash")
    def __eq__(self, other): print("compared")
    def __instancecheck__(self, other): print("asked for its instances")
class C(metaclass=Meta): pass
""",
    "attributes that run code": """
class Nosy:
    def __getattribute__(self, name): print("asked for", name, flush=True)
    @property
    def __class__(self): print("asked for its class", flush=True)
kept = Nosy()
""",
    "callback of a weak reference": """
import weakref
class C: pass
c = C(); c.me = c
kept = weakref.ref(c, lambda _: print("called back", flush=True)); del c
import gc; gc.collect(0)
""",
    "library callback after ours": """
class D:
    def __del__(self): print("late destructor", flush=True)
LATE.append(lambda: globals().update(d=D()))
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


WRITERS = {
    "plain": "w = open(path, 'w'); w.write(text)",
    "binary": "w = open(path, 'wb'); w.write(text.encode())",
    "random": "w = open(path, 'w+b'); w.write(text.encode())",
    "io over io": "import io; w = io.TextIOWrapper(open(path, 'wb')); w.write(text)",
    "gzip": "import gzip; w = gzip.open(path, 'wb'); w.write(text.encode())",
    "bz2": "import bz2; w = bz2.open(path, 'wb'); w.write(text.encode())",
    "lzma": "import lzma; w = lzma.open(path, 'wb'); w.write(text.encode())",
    "zipfile": "import zipfile; w = zipfile.ZipFile(path, 'w'); w.writestr('a', text)",
    "tarfile": """
import io, tarfile
w = tarfile.open(path, "w:gz"); info = tarfile.TarInfo("a"); info.size = len(text)
w.addfile(info, io.BytesIO(text.encode()))
""",
    "file in another's clothes": """
import io, os
class Raw:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    readable = seekable = lambda self: False
    writable = lambda self: True
    closed = False
    def write(self, part, write=os.write): return write(self.fd, part)
    def flush(self): pass
    def close(self): self.closed = True
w = io.TextIOWrapper(Raw()); w.write(text)
""",
    "own close": """
import io, os
class Own(io.StringIO):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    def close(self, write=os.write): write(self.fd, b"closed")
w = Own(); w.write(text)
""",
    "fsspec": """
import fsspec
w = fsspec.filesystem("file", auto_mkdir=True).open(path, "wb", compression="gzip")
w.write(text.encode())
""",
    "temporary": "import tempfile; w = tempfile.NamedTemporaryFile(dir=folder); w.write(b'x')",
    "memory map": """
import mmap
open(path, "wb").write(bytes(4096)); f = open(path, "r+b")
w = mmap.mmap(f.fileno(), 4096); w[:4] = b"text"
""",
    "shelve": "import shelve; w = shelve.open(path, writeback=True); w['a'] = [1]",
    "written by the very last callback": """
w = open(path, "w"); LATE.append(lambda: w.write(text))
""",
    "frozen by the program": """
import gc, gzip
w = gzip.open(path, "wt"); w.write(text); gc.freeze()
""",
    "busy thread": """
import threading
w = open(path, "w"); w.write(text)
threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
}
LATE = "import atexit; LATE = []; atexit.register(lambda: [late() for late in LATE])\n"


@pytest.mark.parametrize("name", WRITERS)
def test_files_are_the_same(name: str, tmp_path: Path) -> None:
    """A file that nobody closes ends up as the ordinary exit leaves it, byte for byte."""
    if name == "fsspec":
        pytest.importorskip("fsspec")
    contents = []
    for prelude in (FAST, PLAIN):
        folder = tmp_path / str(len(contents))
        folder.mkdir()
        program = f"""
folder = {str(folder)!r}; path = folder + "/out"; text = "last words " * 50
import time; time.time = lambda: 0.0
{WRITERS[name]}
class Keeper: pass
kept = Keeper(); kept.me = kept; kept.file = w
def function(): return kept
del w
"""
        if "LATE" in program:
            program = program.replace("del w", "")
        run(LATE + prelude + program)
        contents.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert contents[0] == contents[1]
    assert contents[1] or name == "temporary", "nothing was written, so nothing is compared"


# Registered before the library: so it runs when the library has decided.
ASK = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
QUIET = {
    "nothing": "",
    "a logger": "import logging; logging.getLogger().addHandler(logging.StreamHandler())",
    "a resource": "import torch_utils\nclass R(torch_utils.Resource):\n  def _release(self): pass\n"
    "kept = R()",
    "torch": "import torch; kept = torch.nn.Linear(2, 2)",
    "a file that is flushed": "kept = open('/dev/null', 'w'); kept.write('x')",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "torch" else n for n in QUIET]
)
def test_heap_is_frozen_where_nothing_needs_it(name: str) -> None:
    """The heap is frozen, with fast_exit and only with it, unless something needs telling."""
    start = run_forked if name == "torch" else run
    assert start(ASK + FAST + QUIET[name]).stdout == "True\n"
    assert start(ASK + PLAIN + QUIET[name]).stdout == "False\n"
    destructor = "\nclass D:\n  def __del__(self): pass\nd = D()\n"
    assert start(ASK + FAST + QUIET[name] + destructor).stdout == "False\n"


THREAD = """
import threading, time
def tuples():
    while True:
        tuple(time.sleep(0) for _ in range(9))
"""


def test_no_list_of_all_objects_beside_another_thread() -> None:
    """It may be making a tuple, which such a list makes a SystemError; one that ended is not."""
    running = run(ASK + FAST + THREAD + "threading.Thread(target=tuples, daemon=True).start()")
    assert running.stdout == "False\n"
    ended = run(ASK + FAST + THREAD + "t = threading.Thread(target=int); t.start(); t.join()")
    assert ended.stdout == "True\n"


PACKAGE = """
class Tracker:
    def __init__(self): self.pid = None; self.waiting = []
    def __del__(self): print("tracker", self.pid, flush=True)
tracker = Tracker()
"""


@pytest.mark.parametrize("place", ["lib/site-packages", "app-src", "lib/site-packages-old"])
def test_idle_single_object(place: str, tmp_path: Path) -> None:
    """An installed package's unused object is passed over; a used one, or the program's, is not."""
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "tracking.py").write_text(PACKAGE)
    prelude = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + ASK + FAST
    idle = run(prelude + "import tracking")
    used = run(prelude + "import tracking; tracking.tracker.pid = 7")
    assert ("True" in idle.stdout) == (place == "lib/site-packages")
    assert ("tracker None" in idle.stdout) == (place != "lib/site-packages")
    assert used.stdout == "False\ntracker 7\n"


def test_packages_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """No attribute of a foreign module is read: torch warns on some, wherever it is installed."""
    (tmp_path / "warns.py").write_text(
        "class Old:\n  def __getattribute__(self, name): print('asked')\nold = Old()\n"
        "def __getattr__(name): print('asked for', name)\n"
    )
    result = run(ASK + FAST + f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import warns")
    assert (result.stdout, result.stderr) == ("True\n", "")


UNKNOWN = """
import gc, zlib
from torch_utils import _finalizers

compressor = zlib.compressobj()
kept = [((compressor,),)]
gc.collect(), gc.collect()  # One for each level of tuples.
assert not gc.is_tracked(compressor) and not gc.is_tracked(kept[0])

def is_found():
    survey = _finalizers.Survey()
    survey.look()
    return any(thing is compressor for thing in survey._suspects)

assert not is_found()  # The control: zlib's are known to be nothing but data.
_finalizers._PLAIN_DATA = frozenset()
_finalizers._BEGINNINGS = ("compress",)
assert is_found()
"""


def test_objects_unknown_to_garbage_collection() -> None:
    """An extension type's writer is found inside what holds it, also inside of untracked tuples."""
    assert_clean(run(UNKNOWN))
