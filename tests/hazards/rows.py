"""The matrix of shutdown hazards: every way an object is kept alive, and a program ends.

Each program runs with ``make``, ``close``, ``is_alive`` and ``log`` of `subjects`, and says
``x`` for the object. What it makes must be released exactly once, in the process that made it,
with nothing on stderr, unless the row says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("resource", "scope", "retriever", "model", "naive", "naive-torch")
OURS = ALL[:4]


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: The row's number in the list of hazards, and what it is.
        program: Python source.
        returncode: How it must end.
        stderr: A pattern that stderr must match as a whole; empty means that it is empty.
        released: How often each object must be released: 0 where nothing can be caught.
        needs_torch: Whether it needs torch whatever the subject is.
        options: Options of the interpreter. A program with options has a process of its own
            from the start, as have those that need ``own_process``.
        subjects: Which subjects it makes sense for.
        late: Whether the program itself imports the library, later than the subjects would.
    """

    name: str
    program: str
    returncode: int = 0
    stderr: str = ""
    released: int = 1
    needs_torch: bool = False
    options: tuple[str, ...] = ()
    own_process: bool = False
    subjects: tuple[str, ...] = ALL
    late: bool = False


PLACES = [
    Row("01 main global", "x = make()"),
    Row("02 underscore global", "_x = make()"),
    Row(
        "03 user module",
        "import sys, types; m = types.ModuleType('user'); sys.modules['user'] = m\n"
        "m.x = make(); del m",
    ),
    Row("04 builtins", "import builtins; builtins.x = make()"),
    Row("05 sys", "import sys; sys.x = make()"),
    Row("06 torch", "import torch; torch.x = make()", needs_torch=True),
    Row("07 torch.cuda", "import torch; torch.cuda.x = make()", needs_torch=True),
    Row("08 logging", "import logging; logging.x = make()"),
    Row("08 threading", "import threading; threading.x = make()"),
    Row("08 os", "import os; os.x = make()"),
    Row(
        "09 module that survives",
        "import sys, types; m = types.ModuleType('user'); m.me = sys.kept = m\nm.x = make()",
    ),
    Row("10 excepthook", "import sys; x = make(); sys.excepthook = lambda *a: x"),
    Row(
        "11 unraisablehook",
        "import sys; x = make()\n"
        "sys.unraisablehook = lambda error, x=x: sys.__unraisablehook__(error)",
    ),
    Row("12 cycle", "x = make(); c = [x]; c.append(c)"),
    Row("12 cycle, dropped", "x = make(); c = [x]; c.append(c); del x, c"),
    Row("13 cycle, gc off", "import gc; gc.disable(); x = make(); c = [x]; c.append(c); del x, c"),
    Row("14 frozen", "import gc; x = make(); c = [x]; c.append(c); del x, c; gc.freeze()"),
    Row("15 thread-local", "import threading; t = threading.local(); t.x = make()"),
    Row(
        "16 daemon thread's frame",
        "import threading, time\ndef f():\n    x = make(); ready.set(); time.sleep(100)\n"
        "ready = threading.Event(); threading.Thread(target=f, daemon=True).start()\n"
        "ready.wait()",
    ),
    Row("17 codecs", "import codecs; codecs.register(lambda name, x=make(): None)"),
    Row("18 at-fork hook", "import os; os.register_at_fork(before=lambda x=make(): None)"),
    Row(
        "19 context variable", "import contextvars; v = contextvars.ContextVar('v'); v.set(make())"
    ),
    Row(
        "20 lru_cache",
        "import functools\n@functools.lru_cache\ndef f(): return make()\nf()",
    ),
    Row("20 default argument", "def f(x=make()): pass"),
    Row("20 class attribute", "class C: x = make()"),
    Row("21 suspended generator", "def g():\n    x = make(); yield\ng = g(); next(g)"),
    Row(
        "22 traceback",
        "import sys\ndef f():\n    x = make(); 1 / 0\n"
        "try: f()\nexcept ZeroDivisionError as e: sys.kept = e",
    ),
    Row(
        "23 ctypes callback",
        "import ctypes; x = make()\nf = ctypes.CFUNCTYPE(None)(lambda x=x: None); ctypes.kept = f",
    ),
    Row(
        "23 leaked reference", "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(make()))"
    ),
    Row("24 tensor attribute", "import torch; t = torch.ones(1); t.x = make()", needs_torch=True),
    Row(
        "24 autograd hook",
        "import torch; t = torch.ones(1, requires_grad=True)\n"
        "t.register_hook(lambda g, x=make(): None); torch.kept = t * 2",
        needs_torch=True,
    ),
    Row(
        "24 global forward hook",
        "import torch.nn.modules.module as m\n"
        "m.register_module_forward_hook(lambda *a, x=make(): None)",
        needs_torch=True,
    ),
    Row(
        "24 torch.library",
        "import torch; lib = torch.library.Library('hazard', 'DEF')\n"
        "lib.define('op(Tensor t) -> Tensor')\n"
        "lib.impl('op', lambda t, x=make(): t, 'CPU')",
        needs_torch=True,
    ),
    Row(
        "25 logging handler",
        "import logging\nclass H(logging.Handler):\n    def emit(self, record): pass\n"
        "h = H(); h.x = make(); logging.getLogger().addHandler(h); del h",
    ),
]

TRACEBACK = r"Traceback \(most recent call last\):\n(  .*\n)+{}\n"

ENDINGS = [
    Row(
        "26 unhandled exception",
        "x = make(); 1 / 0",
        returncode=1,
        stderr=TRACEBACK.format("ZeroDivisionError: division by zero"),
    ),
    Row("27 sys.exit(3)", "import sys; x = make(); sys.exit(3)", returncode=3),
    Row(
        "28 SIGINT in main",
        "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "x = make(); os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
        returncode=-2,
        stderr=TRACEBACK.format("KeyboardInterrupt"),
    ),
    Row(
        "29 SIGINT while joining",
        "import os, signal, threading, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nx = make()\n"
        "def f():\n    time.sleep(0.4); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2)\n"
        "threading.Thread(target=f).start()",
        # What the interpreter itself prints about the interrupted join, in its dialects.
        stderr=r"(Exception ignored in: <module 'threading'.*\n|Exception ignored on threading "
        r"shutdown.*\n)?(Traceback .*\n)?(  .*\n)*(KeyboardInterrupt:? ?\n?)?",
    ),
    Row(
        "30 SIGTERM, default",
        "import os, signal, time; x = make(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
        returncode=-15,
        released=0,
    ),
    Row(
        "30 SIGTERM, exit_on_signals",
        "import os, signal, time; from torch_utils import exit_on_signals; exit_on_signals()\n"
        "x = make(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
        returncode=143,
    ),
    Row("30 os._exit", "import os; x = make(); os._exit(4)", returncode=4, released=0),
    Row(
        "31 crash in atexit",
        "import atexit; x = make(); atexit.register(lambda: 1 / 0)",
        stderr=r"(Exception ignored in atexit callback.*\n|Error in atexit.*\n)"
        + TRACEBACK.format("ZeroDivisionError: division by zero"),
    ),
    Row("32 stdout closed", "import sys; x = make(); sys.stdout.close()"),
    Row("32 stdout's descriptor closed", "import os; x = make(); os.close(1)"),
    Row("33 stderr closed", "import sys; x = make(); sys.stderr.close()"),
]

ORDER = [
    Row(
        "34 atexit callback after the library",
        "import atexit; x = make(); atexit.register(lambda: log('alive', is_alive(x)))",
    ),
    Row(
        "34 atexit callback before the library",
        "import atexit; atexit.register(lambda: log('called', 0)); x = make()",
        own_process=True,
        late=True,
    ),
    Row(
        "35 made in an atexit callback",
        "import atexit; atexit.register(lambda: globals().update(x=make()))",
        # No "model": by then transformers cannot load one, for it uses an executor.
        subjects=("resource", "scope", "retriever", "naive", "naive-torch"),
    ),
    Row(
        "35 made in a callback from before the library",
        "import atexit; atexit.register(lambda: globals().update(x=make()))\n"
        "first = make(); close(first)",
        own_process=True,
        late=True,
        subjects=("resource", "scope", "retriever", "naive"),
    ),
    Row(
        "36 library before torch",
        "x = make(); import torch",
        needs_torch=True,
        own_process=True,
        subjects=("resource", "scope", "naive-torch"),
    ),
    Row(
        "36 library after torch",
        "import torch; x = make()",
        needs_torch=True,
        own_process=True,
        late=True,
        subjects=("resource", "scope", "naive-torch"),
    ),
    Row(
        "36 library without torch",
        "x = make(); import sys; assert 'torch' not in sys.modules",
        own_process=True,
        subjects=("resource", "scope", "naive"),
    ),
    Row(
        "37 library first imported in atexit",
        "import atexit; atexit.register(lambda: globals().update(x=make()))",
        own_process=True,
        late=True,
        subjects=("resource", "scope", "naive"),
    ),
    Row(
        "38 thread used in cleanup",
        "import threading\ndef work():\n"
        "    t = threading.Thread(target=int); t.start(); t.join()\n"
        "x = make(work)",
    ),
    Row(
        "38 executor used in cleanup",
        "import concurrent.futures as f\n"
        "pool = f.ThreadPoolExecutor(1); pool.submit(int).result()\n"
        "x = make(lambda: pool.submit(int).result())",
    ),
    Row(
        "39 thread waits for a release",
        "import threading; done = threading.Event(); x = make(done.set)\n"
        "threading.Thread(target=done.wait, args=(0.5,)).start()",
    ),
    Row(
        "40 daemon thread uses it",
        "import threading, time\nx = make()\ndef f():\n"
        "    while is_alive(x): time.sleep(0.001)\n"
        "threading.Thread(target=f, daemon=True).start(); time.sleep(0.05)",
    ),
    Row(
        "40 daemon thread embeds with it",
        "import threading, time\nx = make()\ndef f():\n"
        "    while True: x.embed_query('cache')\n"
        "threading.Thread(target=f, daemon=True).start(); time.sleep(0.2)",
        subjects=("model",),
    ),
    Row(
        "40 daemon thread searches in it",
        "import threading, time\nx = make()\ndef f():\n"
        "    while True: x.search('cache')\n"
        "threading.Thread(target=f, daemon=True).start(); time.sleep(0.2)",
        subjects=("retriever",),
    ),
]
