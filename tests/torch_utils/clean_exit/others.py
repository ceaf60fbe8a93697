"""Programs that are more than one process, or print what others print: dirty, clean, quoting."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAM = "{python} {program}"


@dataclass(frozen=True)
class Trio:
    """A dirty program, its clean twin, and one that only looks like the dirty one.

    Attributes:
        id: The finding that the dirty one has to have.
        name: What is special about it.
        dirty, clean: Python source.
        quotes: Python source of a program that prints the words; None where nothing could
            tell it from the dirty one.
        command: For a shell, with the interpreter and the program's path put in.
    """

    id: str
    name: str
    dirty: str
    clean: str
    quotes: str | None = None
    command: str = PROGRAM

    def __str__(self) -> str:
        return f"{self.id}-{self.name}"


FAILS = "class A:\n    def __del__(self): raise ValueError('the driver is gone')\n"
WORKS = "class A:\n    def __del__(self): pass\n"
MESSAGE = (
    "Exception ignored in: <function A.__del__ at 0x7f>\\nTraceback (most recent call last):\\n"
    '  File "a.py", line 3, in __del__\\nValueError: the driver is gone\\n'
)
QUOTES = f"import sys\nsys.stderr.write('''{MESSAGE}''')\n"

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
        Trio("unraisable", name, source.format(body=FAILS), source.format(body=WORKS))
        for name, source in BOTH
    ),
    *(
        Trio(
            "unraisable",
            name,
            source.replace("{code!r}", repr(_code(FAILS))),
            source.replace("{code!r}", repr(_code(WORKS))),
        )
        for name, source in [("exec-at-exit", AT_EXIT_EXEC), ("sub-interpreter", NESTED)]
    ),
    Trio(
        "unraisable",
        "fork-in-c",
        FORK_IN_C.format(body="import sys", python="PYTHON", code=_code(FAILS)).replace(
            "'PYTHON'", "sys.executable"
        ),
        FORK_IN_C.format(body="import sys", python="PYTHON", code=_code(WORKS)).replace(
            "'PYTHON'", "sys.executable"
        ),
    ),
    Trio(
        "unraisable",
        "other-record",
        _code(FAILS),
        _code(WORKS),
        command="{python} -I {program}; {python} -c 'print(1)'",
    ),
    Trio(
        "unraisable",
        "before-exec",
        _code(FAILS),
        _code(WORKS),
        command="{python} -I {program}; exec {python} -c 'print(1)'",
    ),
    Trio("unraisable", "alone", _code(FAILS), _code(WORKS), QUOTES),
    Trio(
        "unraisable",
        "alone-with-files-closed",
        CLOSED.format(body=_code(FAILS)),
        CLOSED.format(body=_code(WORKS)),
        CLOSED.format(body=QUOTES),
    ),
    Trio(
        "unraisable",
        "alone-in-threads",
        _code(FAILS),
        _code(WORKS),
        f"import threading\nt = threading.Thread(target=lambda: None)\nt.start()\n{QUOTES}",
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
import multiprocessing, time
queue = multiprocessing.get_context("{method}").Queue()
queue.put({thing})
time.sleep(0.5)
"""
GROUP = """
import sys, threading
if sys.version_info < (3, 11):
    ExceptionGroup = None
def work():
    {body}
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
SAY = "import sys\nsys.stderr.write({!r})\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "{}", line 244, in {}\n    x\n'

SAID = [
    Trio(
        "unraisable",
        "task-destroyed",
        PENDING.format(
            then="", around="loop.run_until_complete(main())\nloop.close()\ngc.collect()"
        ),
        PENDING.format(
            then="task.cancel()\n    await asyncio.sleep(0)",
            around="loop.run_until_complete(main())\nloop.close()\ngc.collect()",
        ),
        SAY.format("Task was destroyed but it is pending!\ntask: <Task pending name='Task-1'>\n"),
    ),
    Trio(
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
        "import asyncio\n"
        + SAY.format("see: Task was destroyed but it is pending!\nin the manual of asyncio\n"),
    ),
    Trio(
        "unraisable",
        "task-exception",
        NEVER.format(fails="raise KeyError('lost')"),
        NEVER.format(fails="pass"),
        SAY.format("Task exception was never retrieved\nfuture: <Task finished name='Task-1'>\n"),
    ),
    Trio(
        "unraisable",
        "future-exception",
        FUTURE.format(then="future = None"),
        FUTURE.format(then="future.exception()"),
        "import asyncio\n" + SAY.format("docs on: Future exception was never retrieved\n\n"),
    ),
    Trio(
        "thread-error",
        "queue-feeder",
        FEEDER.format(method="fork", thing="lambda: None"),
        FEEDER.format(method="fork", thing="1") + "queue.get()\n",
        SAY.format(TRACEBACK.format("/usr/lib/multiprocessing/queues.py", "_feed") + "E: x\n"),
    ),
    Trio(
        "thread-error",
        "exception-group",
        GROUP.format(body="raise (ExceptionGroup or ValueError)('many', [ValueError('a')])"),
        GROUP.format(body="return"),
        SAY.format(
            "Exception in thread Thread-1 (work):\n"
            "  + Exception Group Traceback (most recent call last):\n"
            '  |   File "a.py", line 3, in work\n'
            "  | ExceptionGroup: many (1 sub-exception)\n"
            "  +-+---------------- 1 ----------------\n"
            "    | ValueError: a\n"
            "    +------------------------------------\n"
        ),
    ),
    Trio(
        "thread-error",
        "exception-group-by-text",
        GROUP.format(body="raise (ExceptionGroup or ValueError)('many', [ValueError('a')])"),
        GROUP.format(body="return"),
        None,
        "env -i {python} {program}",
    ),
]

SEGFAULT = "import ctypes\nctypes.string_at(0)\n"
FINE = "import ctypes\nctypes.string_at(b'')\n"
ABORT = "import os\nos.abort()\n"
CRASHED = [
    Trio(
        "crash",
        "in-a-shell",
        SEGFAULT,
        FINE,
        SAY.format("Segmentation fault\n"),
        command="{python} {program}; exit 0",
    ),
    Trio(
        "crash",
        "in-a-shell-unprobed",
        SEGFAULT,
        FINE,
        None,
        command="{python} -I {program}; exit 0",
    ),
    Trio("crash", "in-sh", ABORT, FINE, SAY.format("Aborted\n"), "{python} {program}; exit 0"),
    Trio("crash", "in-bash", ABORT, FINE, None, command="bash -c '{python} {program}; exit 0'"),
    Trio(
        "crash",
        "fatal-error-of-a-child",
        SEGFAULT,
        FINE,
        SAY.format("Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f:\n"),
        command="{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' "
        "{python} -X faulthandler {program}",
    ),
    Trio(
        "crash",
        "terminate-called",
        "import os, sys\nsys.stderr.write('terminate called without an active exception\\n')\n"
        "os.abort()\n",
        FINE,
        SAY.format("terminate called without an active exception\n"),
        command="{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' "
        "{python} {program}",
    ),
    Trio(
        "crash",
        "exit-code-139",
        SEGFAULT,
        FINE,
        None,
        command="{python} -I {program} 2> /dev/null; exit $?",
    ),
]

SEMAPHORE = """
import multiprocessing, os
if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()
    {}
"""
LEAKED = [
    Trio(
        "leaked-semaphore",
        "silenced",
        SEMAPHORE.format("os._exit(0)"),
        SEMAPHORE.format("del lock"),
        command="{python} -W ignore {program}",
    ),
    Trio(
        "leaked-semaphore",
        "redirected",
        SEMAPHORE.format("os._exit(0)"),
        SEMAPHORE.format("del lock"),
        SAY.format(
            "/a/resource_tracker.py:1: UserWarning: resource_tracker: There appear to be "
            "1 leaked semaphore objects to clean up at shutdown\n"
        ),
        command="{python} {program} 2> /dev/null",
    ),
]

OTHERS = [*ATTRIBUTED, *SAID, *CRASHED, *LEAKED]
