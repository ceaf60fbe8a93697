"""Programs that leave uncleanly, each with a twin that does the same thing and leaves cleanly."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A dirty program and its clean twin.

    Attributes:
        id: The finding that the dirty one has to have.
        name: What is special about it.
        dirty, clean: Python source; each is written to a file and run.
        options: For `check`.
        prefix: Put before the Python in the command line: how it is started.
        flags: The interpreter's options.
        command: For a shell, with {python} and {program}, where it is more than one command.
    """

    id: str
    name: str
    dirty: str
    clean: str
    options: dict[str, Any] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    command: str = ""

    def __str__(self) -> str:
        return f"{self.id}-{self.name}"

    def source(self, which: str) -> str:
        return textwrap.dedent(getattr(self, which))

    def line(self, python: str, program: str) -> list[str]:
        """Return the command line that runs it."""
        if self.command:
            return ["sh", "-c", self.command.format(python=python, program=program)]
        return [*self.prefix, python, *self.flags, program]


# Without an environment there is no probe: the text on stderr is all there is.
NO_PROBE = ("/usr/bin/env", "-i")

CLASS = """
class Resource:
    def __del__(self):
        {body}
"""
FAILING = CLASS.format(body="raise ValueError('the driver is gone')")
QUIET = CLASS.format(body="pass")
AT_EXIT = "\nresource = Resource()\n"
NOW = "\nResource()\n"

UNRAISABLE = [
    Pair("unraisable", "destructor-at-exit", FAILING + AT_EXIT, QUIET + AT_EXIT),
    Pair("unraisable", "destructor-in-main", FAILING + NOW, QUIET + NOW),
    Pair(
        "unraisable",
        "hook-replaced",
        "import sys\nsys.unraisablehook = lambda *a: None\n" + FAILING + AT_EXIT,
        "import sys\nsys.unraisablehook = lambda *a: None\n" + QUIET + AT_EXIT,
    ),
    Pair(
        "unraisable",
        "stderr-closed",
        "import os\nos.close(2)\n" + FAILING + NOW,
        "import os\nos.close(2)\n" + QUIET + NOW,
    ),
    Pair(
        "unraisable",
        "module-global-is-none",
        "import helper_of_test as h\n" + FAILING.replace("raise", "h.check(); raise") + AT_EXIT,
        "import json as h\n" + QUIET + AT_EXIT,
    ),
    Pair(
        "unraisable",
        "generator",
        "def g():\n    try:\n        yield\n    finally:\n        1 / 0\nx = g()\nnext(x)\ndel x\n",
        "def g():\n    try:\n        yield\n    finally:\n        pass\nx = g()\nnext(x)\ndel x\n",
    ),
    Pair(
        "unraisable",
        "weakref-callback",
        "import weakref\nclass A: pass\na = A()\nr = weakref.ref(a, lambda r: 1 / 0)\ndel a\n",
        "import weakref\nclass A: pass\na = A()\nr = weakref.ref(a, lambda r: None)\ndel a\n",
    ),
    Pair("unraisable", "isolated", FAILING + NOW, QUIET + NOW, flags=("-I",)),
    Pair("unraisable", "no-site", FAILING + AT_EXIT, QUIET + AT_EXIT, flags=("-I", "-S")),
    Pair("unraisable", "text-only", FAILING + AT_EXIT, QUIET + AT_EXIT, prefix=NO_PROBE),
    Pair("unraisable", "text-only-main", FAILING + NOW, QUIET + NOW, prefix=NO_PROBE),
    Pair(
        "unraisable",
        "forked-child",
        FAILING + "import os\nif os.fork() == 0:\n    Resource()\n    os._exit(0)\nos.wait()\n",
        QUIET + "import os\nif os.fork() == 0:\n    Resource()\n    os._exit(0)\nos.wait()\n",
    ),
    Pair(
        "unraisable",
        "child-interpreter",
        FAILING
        + "import subprocess, sys\n"
        + "if len(sys.argv) == 1:\n    subprocess.run([sys.executable, __file__, 'child'])\n"
        + "else:\n    Resource()\n",
        QUIET
        + "import subprocess, sys\n"
        + "if len(sys.argv) == 1:\n    subprocess.run([sys.executable, __file__, 'child'])\n"
        + "else:\n    Resource()\n",
    ),
    Pair(
        "unraisable",
        "hook-fails",
        "import sys\ndef hook(info): raise KeyError('hook')\nsys.unraisablehook = hook\n"
        + FAILING
        + NOW,
        "import sys\ndef hook(info): raise KeyError('hook')\nsys.unraisablehook = hook\n"
        + QUIET
        + NOW,
    ),
]

ATEXIT = "import atexit\natexit.register({})\n"
FINALIZE = "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, {})\n"
THREAD = "import threading\nt = threading.Thread(target=lambda: {})\nt.start()\nt.join()\n"
RAW = """
import _thread, time
begun = []
def f():
    begun.append(True)
    {}
_thread.start_new_thread(f, ())
while not begun or _thread._count():
    time.sleep(0.01)
"""

CALLBACKS = [
    Pair("atexit-error", "plain", ATEXIT.format("lambda: 1 / 0"), ATEXIT.format("lambda: 1")),
    Pair(
        "atexit-error",
        "text-only",
        ATEXIT.format("lambda: 1 / 0"),
        ATEXIT.format("lambda: 1"),
        prefix=NO_PROBE,
    ),
    Pair(
        "atexit-error",
        "after-an-error",
        ATEXIT.format("lambda: {}['key']") + "import sys\nsys.exit(0)\n",
        ATEXIT.format("lambda: {}") + "import sys\nsys.exit(0)\n",
    ),
    Pair(
        "finalizer-error", "at-exit", FINALIZE.format("lambda: 1 / 0"), FINALIZE.format("len, ''")
    ),
    Pair(
        "finalizer-error",
        "text-only",
        FINALIZE.format("lambda: 1 / 0"),
        FINALIZE.format("len, ''"),
        prefix=NO_PROBE,
    ),
    Pair(
        "finalizer-error",
        "during-collection",
        FINALIZE.format("lambda: 1 / 0") + "a.me = a\ndel a\nimport gc\ngc.collect()\n",
        FINALIZE.format("len, ''") + "a.me = a\ndel a\nimport gc\ngc.collect()\n",
    ),
    Pair("thread-error", "threading", THREAD.format("1 / 0"), THREAD.format("1")),
    Pair("thread-error", "text-only", THREAD.format("1 / 0"), THREAD.format("1"), prefix=NO_PROBE),
    Pair("thread-error", "raw", RAW.format("1 / 0"), RAW.format("return")),
    Pair(
        "thread-error", "raw-text-only", RAW.format("1 / 0"), RAW.format("return"), prefix=NO_PROBE
    ),
]

SLEEP = "import time\ntime.sleep({})\n"
WAITING_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=({},)).start()\n"
SLOW_DESTRUCTOR = CLASS.format(body="import time; time.sleep({})") + "import time\n" + AT_EXIT
LOCK = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire(timeout={})\n"
# Long enough for a clean twin on a busy machine.
HANGS = {"timeout_s": 6.0}
SLOW = {"max_shutdown_s": 3.0}
TOO_LONG = 4

ENDINGS = [
    Pair("crash", "abort", "import os\nos.abort()\n", "import os\nos._exit(0)\n"),
    Pair(
        "crash",
        "segmentation-fault",
        "import ctypes\nctypes.string_at(0)\n",
        "import ctypes\nctypes.string_at(b'')\n",
    ),
    Pair(
        "crash",
        "killed",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "import os, signal\nos.kill(os.getpid(), 0)\n",
    ),
    Pair(
        "crash",
        "own-faulthandler",
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()\n",
        "import faulthandler, os\nfaulthandler.enable()\n",
    ),
    Pair("hang", "in-main", SLEEP.format(60), SLEEP.format(0.1), HANGS),
    Pair("hang", "joining-a-thread", WAITING_THREAD.format(60), WAITING_THREAD.format(0.1), HANGS),
    Pair("hang", "lock", LOCK.format(60), LOCK.format(0.1), HANGS),
    Pair("hang", "text-only", SLEEP.format(60), SLEEP.format(0.1), HANGS, prefix=NO_PROBE),
    Pair(
        "slow-shutdown",
        "atexit",
        f"import atexit, time\natexit.register(time.sleep, {TOO_LONG})\n",
        "import atexit, time\natexit.register(time.sleep, 0.01)\n",
        SLOW,
    ),
    Pair(
        "slow-shutdown",
        "after a thread",
        WAITING_THREAD.format(TOO_LONG)
        + f"import atexit, time\natexit.register(time.sleep, {TOO_LONG})\n",
        WAITING_THREAD.format(TOO_LONG),  # What a thread does is work.
        SLOW,
    ),
    Pair(
        "slow-shutdown",
        "destructor",
        "import time\n"
        + CLASS.format(body=f"self.sleep({TOO_LONG})")
        + "Resource.sleep = staticmethod(time.sleep)"
        + AT_EXIT,
        "import time\n"
        + CLASS.format(body="self.sleep(0.01)")
        + "Resource.sleep = staticmethod(time.sleep)"
        + AT_EXIT,
        SLOW,
    ),
]

SEMAPHORE = """
import multiprocessing, os
if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()
    {}
"""
SHARED = """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.close()
{}
"""
UNTRACKED = """
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = resource_tracker.unregister = lambda name, kind: None
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.close()
{}
"""
CHILD = "import subprocess\nchild = subprocess.Popen(['sleep', '60']{})\n"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {close}
        time.sleep({seconds})
    os._exit(0)
os.wait()
"""
CLOSE = "[os.close(n) for n in (0, 1, 2)]"
GROUP = """
import sys, types
distributed = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: {}
distributed.get_backend = lambda: "nccl"
sys.modules["torch.distributed"] = distributed
"""
NCCL = (
    "[rank0]:[W1121 04:00:00.123456789 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
    "destroy_process_group() was not called before program exit, which can leak resources."
)
IPC = (
    "[W1121 04:00:00.123456789 CudaIPCTypes.cpp:16] Producer process has been terminated before "
    "all shared CUDA tensors released. See Note [Sharing CUDA tensors]"
)
WRITE = "import sys\nprint({!r}, file=sys.stderr)\n"
FILE = "f = open(__file__)\n{}f = None\n"
WARN = {"resource_warnings": True}

LEFT_BEHIND = [
    Pair(
        "leaked-semaphore", "at-exit", SEMAPHORE.format("os._exit(0)"), SEMAPHORE.format("del lock")
    ),
    Pair(
        "leaked-shared-memory",
        "not-tracked",
        UNTRACKED.format(""),
        UNTRACKED.format("memory.unlink()"),
    ),
    Pair("leaked-shared-memory", "at-exit", SHARED.format(""), SHARED.format("memory.unlink()")),
    Pair(
        "orphan-process",
        "child",
        CHILD.format(", stdout=-3, stderr=-3"),
        CHILD.format("") + "child.terminate()\nchild.wait()\n",
    ),
    Pair(
        "orphan-process",
        "holds-the-pipe",
        CHILD.format(""),
        CHILD.format("") + "child.terminate()\nchild.wait()\n",
    ),
    Pair(
        "orphan-process",
        "daemon",
        DAEMON.format(close=CLOSE, seconds=60),
        DAEMON.format(close=CLOSE, seconds=0.1),
    ),
    Pair("process-group-not-destroyed", "asked", GROUP.format(True), GROUP.format(False)),
    Pair(
        "process-group-not-destroyed",
        "said",
        WRITE.format(NCCL),
        WRITE.format(f"never seen: {NCCL}"),
    ),
    Pair("cuda-ipc", "said", WRITE.format(IPC), WRITE.format(f"never seen: {IPC}")),
    Pair("resource-warning", "file", FILE.format(""), FILE.format("f.close()\n"), WARN),
]

# Programs of several processes, and what their other threads, tasks and shells say.

FAILS = "class A:\n    def __del__(self): raise ValueError('the driver is gone')\n"
WORKS = "class A:\n    def __del__(self): pass\n"

START = """
import multiprocessing
{body}
def work():
    A()
if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=work)
    process.start()
    process.join()
"""
FORK_IN_C = """
import ctypes, os
{body}
# As uvloop starts processes: in C, where no hook of Python's sees it.
pid = ctypes.CDLL(None).fork()
if pid == 0:
    python = {python!r}
    os.execv(python, [python, "-I", "-c", {code!r}])
os.waitpid(pid, 0)
"""
EXEC = """
import os, sys
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
{body}
A()
"""
AT_EXIT_EXEC = """
import atexit, os, sys
atexit.register(lambda: os.execv(sys.executable, [sys.executable, "-c", {code!r}]))
"""
# os.setuid as root; else the same program without it.
SETUID = """
import os
if os.getuid() == 0:
    os.setuid(12345)
{body}
A()
"""
CHROOT = """
import os, tempfile
if os.getuid() == 0:
    os.chroot(tempfile.mkdtemp())
{body}
A()
"""
CLOSED = """
import os
os.closerange(3, 1024)
{body}
"""
EXHAUSTED = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.closerange(3, 1024)
files = []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
{body}
A()
"""
AUDITED = """
import os, sys
def refuse(event, args):
    if event == "open":
        raise PermissionError("no files in here")
os.closerange(3, 1024)
sys.addaudithook(refuse)
{body}
A()
"""
NESTED = """
import importlib
for name in "_interpreters", "_xxsubinterpreters":
    try:
        interpreters = importlib.import_module(name)
    except ImportError:
        continue
    break
interpreter = interpreters.create()
interpreters.run_string(interpreter, {code!r})
interpreters.destroy(interpreter)
"""


def _code(body: str) -> str:
    return body + "\nA()\n"


BOTH = [
    ("spawn", START.replace("{method}", "spawn")),
    ("forkserver", START.replace("{method}", "forkserver")),
    ("fork", START.replace("{method}", "fork")),
    ("exec-of-itself", EXEC),
    ("setuid", SETUID),
    ("chroot", CHROOT),
    ("files-exhausted", EXHAUSTED),
    ("own-audit-hook", AUDITED),
]

ATTRIBUTED = [
    *(
        Pair("unraisable", name, source.format(body=FAILS), source.format(body=WORKS))
        for name, source in BOTH
    ),
    *(
        Pair(
            "unraisable",
            name,
            source.replace("{code!r}", repr(_code(FAILS))),
            source.replace("{code!r}", repr(_code(WORKS))),
        )
        for name, source in [("exec-at-exit", AT_EXIT_EXEC), ("sub-interpreter", NESTED)]
    ),
    Pair(
        "unraisable",
        "fork-in-c",
        FORK_IN_C.format(body="import sys", python="PYTHON", code=_code(FAILS)).replace(
            "'PYTHON'", "sys.executable"
        ),
        FORK_IN_C.format(body="import sys", python="PYTHON", code=_code(WORKS)).replace(
            "'PYTHON'", "sys.executable"
        ),
    ),
    Pair(
        "unraisable",
        "other-record",
        _code(FAILS),
        _code(WORKS),
        command="{python} -I {program}; {python} -c 'print(1)'",
    ),
    Pair(
        "unraisable",
        "before-exec",
        _code(FAILS),
        _code(WORKS),
        command="{python} -I {program}; exec {python} -c 'print(1)'",
    ),
    Pair("unraisable", "alone", _code(FAILS), _code(WORKS)),
    Pair(
        "unraisable",
        "alone-with-files-closed",
        CLOSED.format(body=_code(FAILS)),
        CLOSED.format(body=_code(WORKS)),
    ),
    Pair(
        "unraisable",
        "alone-in-threads",
        _code(FAILS),
        _code(WORKS),
    ),
]

PENDING = """
import asyncio, gc
async def wait():
    await asyncio.get_running_loop().create_future()
async def main():
    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    {then}
loop = asyncio.new_event_loop()
{around}
"""
NEVER = """
import asyncio
async def fail(): {fails}
async def main():
    asyncio.ensure_future(fail())
    await asyncio.sleep(0.01)
asyncio.run(main())
"""
FUTURE = """
import asyncio
async def main():
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError("lost"))
    {then}
asyncio.run(main())
"""
FEEDER = """
import multiprocessing
queue = multiprocessing.get_context("fork").Queue()
queue.put({})
queue.close()
queue.join_thread()
"""
ERRORS = """
import sys, threading
if sys.version_info < (3, 11):
    ExceptionGroup = None
def work():
    {body}
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""

SAID = [
    Pair(
        "unraisable",
        "task-destroyed",
        PENDING.format(
            then="", around="loop.run_until_complete(main())\nloop.close()\ngc.collect()"
        ),
        PENDING.format(
            then="task.cancel()\n    await asyncio.sleep(0)",
            around="loop.run_until_complete(main())\nloop.close()\ngc.collect()",
        ),
    ),
    Pair(
        "unraisable",
        "task-destroyed-logged",
        "import logging\nlogging.basicConfig(format='%(asctime)s %(name)s: %(message)s')\n"
        + PENDING.format(
            then="", around="loop.run_until_complete(main())\nloop.close()\ngc.collect()"
        ),
        PENDING.format(
            then="task.cancel()\n    await asyncio.sleep(0)",
            around="loop.run_until_complete(main())\nloop.close()\ngc.collect()",
        ),
    ),
    Pair(
        "unraisable",
        "task-exception",
        NEVER.format(fails="raise KeyError('lost')"),
        NEVER.format(fails="pass"),
    ),
    Pair(
        "unraisable",
        "future-exception",
        FUTURE.format(then="future = None"),
        FUTURE.format(then="future.exception()"),
    ),
    Pair(
        "thread-error",
        "queue-feeder",
        FEEDER.format("lambda: None"),
        FEEDER.format("1"),
    ),
    Pair(
        "thread-error",
        "exception-group",
        ERRORS.format(body="raise (ExceptionGroup or ValueError)('many', [ValueError('a')])"),
        ERRORS.format(body="return"),
    ),
    Pair(
        "thread-error",
        "exception-group-by-text",
        ERRORS.format(body="raise (ExceptionGroup or ValueError)('many', [ValueError('a')])"),
        ERRORS.format(body="return"),
        command="env -i {python} {program}",
    ),
]

SEGFAULT = "import ctypes\nctypes.string_at(0)\n"
FINE = "import ctypes\nctypes.string_at(b'')\n"
ABORT = "import os\nos.abort()\n"
CRASHED = [
    Pair(
        "crash",
        "in-a-shell",
        SEGFAULT,
        FINE,
        command="{python} {program}; exit 0",
    ),
    Pair(
        "crash",
        "in-a-shell-unprobed",
        SEGFAULT,
        FINE,
        command="{python} -I {program}; exit 0",
    ),
    Pair("crash", "in-sh", ABORT, FINE, command="{python} {program}; exit 0"),
    Pair("crash", "in-bash", ABORT, FINE, command="bash -c '{python} {program}; exit 0'"),
    Pair(
        "crash",
        "fatal-error-of-a-child",
        SEGFAULT,
        FINE,
        command="{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' "
        "{python} -X faulthandler {program}",
    ),
    Pair(
        "crash",
        "terminate-called",
        "import os, sys\nsys.stderr.write('terminate called without an active exception\\n')\n"
        "os.abort()\n",
        FINE,
        command="{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' "
        "{python} {program}",
    ),
    Pair(
        "crash",
        "exit-code-139",
        SEGFAULT,
        FINE,
        command="{python} -I {program} 2> /dev/null; exit $?",
    ),
]

LEAKED = [
    Pair(
        "leaked-semaphore",
        "silenced",
        SEMAPHORE.format("os._exit(0)"),
        SEMAPHORE.format("del lock"),
        command="{python} -W ignore {program}",
    ),
    Pair(
        "leaked-semaphore",
        "redirected",
        SEMAPHORE.format("os._exit(0)"),
        SEMAPHORE.format("del lock"),
        command="{python} {program} 2> /dev/null",
    ),
]


CORPUS = [*UNRAISABLE, *CALLBACKS, *ENDINGS, *LEFT_BEHIND, *ATTRIBUTED, *SAID, *CRASHED, *LEAKED]

# Nothing is wrong with these, whatever they print.
CLEAN = {
    "says nothing": "",
    "prints": "print('hello')\n",
    "quotes the phrase on stdout": "print('Exception ignored in: <function A.__del__>')\n",
    "quotes the phrase on stderr": WRITE.format("Exception ignored in: see the manual"),
    "quotes the tracker's warning": WRITE.format(
        "docs: resource_tracker: There appear to be 1 leaked semaphore objects to clean up"
    ),
    "prints a caught traceback": """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        """,
    "logs a caught exception": """
        import logging
        try:
            {}["key"]
        except KeyError:
            logging.exception("Exception in thread pool, ignored")
        """,
    "uses a pool": """
        import multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                assert pool.map(abs, [-1, 2]) == [1, 2]
        """,
    "uses an executor": """
        from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
        if __name__ == "__main__":
            for kind in ThreadPoolExecutor, ProcessPoolExecutor:
                with kind(2) as executor:
                    assert list(executor.map(abs, [-1])) == [1]
        """,
    "runs asyncio": """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec("true")
            await process.wait()
        asyncio.run(main())
        """,
    "has a daemon thread": """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """,
    "uses real finalizers": """
        import atexit, tempfile, weakref
        folder = tempfile.TemporaryDirectory()
        weakref.finalize(folder, print, "gone")
        atexit.register(print, "bye")
        """,
    "handles errors of threads itself": """
        import threading
        threading.excepthook = lambda args: None
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        """,
}
