"""Programs that leave uncleanly, each with a twin that does the same thing and leaves cleanly."""

import textwrap
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A dirty program and its clean twin.

    Attributes:
        id: The finding that the dirty one has to have.
        name: What is special about it.
        program: Python source in which FAULT stands for what the two do differently.
        dirty, clean: What they have in its place.
        options: For `check`.
        command: For a shell, with {python} and {program}, where it is not ``python program``.
    """

    id: str
    name: str
    program: str
    dirty: str = "raise ValueError('the driver is gone')"
    clean: str = "pass"
    options: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    def __str__(self) -> str:
        return f"{self.id}-{self.name}"

    def source(self, which: str) -> str:
        return textwrap.dedent(self.program).replace("FAULT", getattr(self, which))

    def line(self, python: str, program: str) -> list[str]:
        """Return the command line that runs it."""
        command = ["sh", "-c", self.command.format(python=python, program=program)]
        return command if self.command else [python, program]


# Without an environment the probe is not loaded, and only the text on stderr remains.
NO_PROBE = "exec env -i {python} {program}"
CLASS = "class Resource:\n    def __del__(self): FAULT\n"
AT_EXIT = CLASS + "resource = Resource()\n"
NOW = CLASS + "Resource()\n"
HOOK = "import sys\nsys.unraisablehook = lambda *a: None\n"
LOOP = """
import asyncio
loop = asyncio.new_event_loop()
class Session:
    def __del__(self): FAULT
session = Session()
"""
REPORTED = "loop.call_exception_handler({'message': 'Unclosed session'})"
# aiohttp has this text, and this line after it.
UNCLOSED = "loop.call_exception_handler({'message': 'Unclosed client session', "
UNCLOSED += "'client_session': loop})"
FUTURE = """
import atexit, concurrent.futures
future = concurrent.futures.Future()
future.add_done_callback(lambda future: FAULT)
atexit.register(future.set_result, 1)
"""
PENDING = """
import asyncio, gc
async def main():
    task = asyncio.ensure_future(asyncio.sleep(999))
    await asyncio.sleep(0)
    FAULT
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
gc.collect()
"""
CANCELLED = "task.cancel()\n    await asyncio.sleep(0)"
NEVER = """
import asyncio
async def fail(): FAULT
async def main():
    asyncio.ensure_future(fail())
    await asyncio.sleep(0.01)
asyncio.run(main())
"""
UNITTEST = """
import unittest
class Case(unittest.TestCase):
    def test_it(self): FAULT
unittest.main(exit=False)
"""

ERRORS = [
    Pair("unraisable", "destructor-at-exit", AT_EXIT),
    Pair("unraisable", "hook-replaced", HOOK + AT_EXIT),
    Pair("unraisable", "stderr-closed", "import os\nos.close(2)\n" + NOW),
    Pair("unraisable", "text-only", AT_EXIT, command=NO_PROBE),
    Pair("unraisable", "session-at-exit", LOOP, REPORTED, "loop.close()"),
    Pair("unraisable", "session-in-main", LOOP + "del session\n", UNCLOSED, "loop.close()"),
    Pair("unraisable", "callback-of-a-future", FUTURE, "1 / 0", "1"),
    Pair("unraisable", "task-destroyed", PENDING, "pass", CANCELLED),
    Pair("unraisable", "task-exception", NEVER, "raise KeyError('lost')"),
    Pair("failed-tests", "unittest", UNITTEST),
]

ATEXIT = "import atexit\natexit.register(lambda: FAULT)\n"
FINALIZE = "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, lambda: FAULT)\n"
COLLECTED = FINALIZE + "a.me = a\ndel a\nimport gc\ngc.collect()\n"
THREAD = "import threading\nt = threading.Thread(target=lambda: FAULT)\nt.start()\nt.join()\n"
RAW = """
import _thread, time
begun = []
def f():
    begun.append(True)
    FAULT
_thread.start_new_thread(f, ())
while not begun or _thread._count(): time.sleep(0.01)
"""
FEEDER = """
import multiprocessing
queue = multiprocessing.get_context("fork").Queue()
queue.put(FAULT)
queue.close()
queue.join_thread()
"""
GROUP_RAISED = "exec(\"raise ExceptionGroup('many', [ValueError('a')])\")"
LOGGING = """
import atexit, io, logging, threading, time
stream = io.StringIO()
logging.basicConfig(stream=stream)
def close(): FAULT
close()
def log(): logging.error("bye")
"""
LOG_AT_EXIT = LOGGING + "atexit.register(log)\n"
LOG_IN_THREAD = "threading.Thread(target=lambda: (time.sleep(0.3), log())).start()\n"

CALLBACKS = [
    Pair("logging-error", "at-exit", LOG_AT_EXIT, "stream.close()"),
    Pair("logging-error", "joined-thread", LOGGING + LOG_IN_THREAD, "stream.close()"),
    Pair("atexit-error", "plain", ATEXIT, "1 / 0", "1"),
    Pair("finalizer-error", "at-exit", FINALIZE, "1 / 0", "1"),
    Pair("finalizer-error", "during-collection", COLLECTED, "1 / 0", "1"),
    Pair("thread-error", "threading", THREAD, "1 / 0", "1"),
    Pair("thread-error", "raw", RAW, "1 / 0", "return"),
    Pair("thread-error", "queue-feeder", FEEDER, "lambda: None", "1"),
    Pair("thread-error", "exception-group", THREAD, GROUP_RAISED, "1"),
]

HANGS = {"timeout_s": 4.0}  # Long enough to start on a busy machine.
SLOW = {"max_shutdown_s": 2.0}
TOO_LONG = "3"
SLEEP = "import time\ntime.sleep(FAULT)\n"
WAITING_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=({},)).start()\n"
SLOW_EXIT = "import atexit, time\natexit.register(time.sleep, FAULT)\n"
AFTER_A_THREAD = WAITING_THREAD.format(TOO_LONG) + SLOW_EXIT  # What a thread does is work.
SLOW_DESTRUCTOR = """
import time
class Resource:
    def __del__(self, sleep=time.sleep): sleep(FAULT)
resource = Resource()
"""
SIGNAL = "import os, signal\nos.kill(os.getpid(), FAULT)\n"
STRING = "import ctypes\nctypes.string_at(FAULT)\n"
TERMINATES = "import os, sys\nFAULT\n"
TERMINATE = "sys.stderr.write('terminate called without an active exception\\n')\nos.abort()"
PARENT = "{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' {python} "
SHELL = "{python} {program}; exit 0"
UNPROBED = "{python} -I {program}; exit 0"
CODE_139 = "{python} -I {program} 2> /dev/null; exit $?"

ENDINGS = [
    Pair("crash", "abort", "import os\nFAULT\n", "os.abort()", "os._exit(0)"),
    Pair("crash", "killed", SIGNAL, "signal.SIGKILL", "0"),
    Pair("crash", "in-a-shell", STRING, "0", "b''", command=SHELL),
    Pair("crash", "in-a-shell-unprobed", STRING, "0", "b''", command=UNPROBED),
    Pair("crash", "of-a-child", STRING, "0", "b''", command=PARENT + "-X faulthandler {program}"),
    Pair("crash", "exit-code-139", STRING, "0", "b''", command=CODE_139),
    Pair("crash", "terminate-called", TERMINATES, TERMINATE, command=PARENT + "{program}"),
    Pair("hang", "in-main", SLEEP, "60", "0.1", HANGS),
    Pair("hang", "joining-a-thread", WAITING_THREAD.format("FAULT"), "60", "0.1", HANGS),
    Pair("hang", "text-only", SLEEP, "60", "0.1", HANGS, command=NO_PROBE),
    Pair("slow-shutdown", "atexit", SLOW_EXIT, TOO_LONG, "0.01", SLOW),
    Pair("slow-shutdown", "after-a-thread", AFTER_A_THREAD, TOO_LONG, "0", SLOW),
    Pair("slow-shutdown", "destructor", SLOW_DESTRUCTOR, TOO_LONG, "0.01", SLOW),
]

SEMAPHORE = """
import multiprocessing, os
if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()
    FAULT
"""
SHARED = """
from multiprocessing import resource_tracker, shared_memory
{}
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.close()
FAULT
"""
UNTRACKED = "resource_tracker.register = resource_tracker.unregister = lambda name, kind: None"
CHILD = "import subprocess\nchild = subprocess.Popen(['sleep', '60']{})\nFAULT\n"
ENDED = "child.terminate()\nchild.wait()"
DAEMON = "import subprocess\nsubprocess.run('setsid sleep FAULT >/dev/null 2>&1 &', shell=True)\n"
GROUP = """
import os, sys, types
distributed = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: is_on
distributed.get_backend = lambda: "nccl"
sys.modules["torch.distributed"] = distributed
is_on = FAULT
"""
# A child has the group of its parent, which it is not blamed for.
OF_A_FORK = """
if os.fork() == 0:
    is_on = True
    sys.exit()
os.wait()
is_on = False
"""
NCCL = "[rank0]:[W1121 04:00:00.123456789 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
NCCL += "destroy_process_group() was not called before program exit, which can leak resources."
IPC = "[W1121 04:00:00.123456789 CudaIPCTypes.cpp:16] Producer process has been terminated before "
IPC += "all shared CUDA tensors released. See Note [Sharing CUDA tensors]"
WRITE = "import sys\nprint({!r}, file=sys.stderr)\n"
SAYS_NCCL, SAYS_IPC = WRITE.format(f"FAULT{NCCL}"), WRITE.format(f"FAULT{IPC}")
FILE = "f = open(__file__)\nFAULT\nf = None\n"
WARN = {"resource_warnings": True}
SILENCED = "{python} -W ignore {program}"
REDIRECTED = "{python} {program} 2> /dev/null"

LEFT_BEHIND = [
    Pair("leaked-semaphore", "at-exit", SEMAPHORE, "os._exit(0)", "del lock"),
    Pair("leaked-semaphore", "silenced", SEMAPHORE, "os._exit(0)", "del lock", command=SILENCED),
    Pair("leaked-semaphore", "redirected", SEMAPHORE, "os._exit(0)", "0", command=REDIRECTED),
    Pair("leaked-shared-memory", "not-tracked", SHARED.format(UNTRACKED), "", "memory.unlink()"),
    Pair("leaked-shared-memory", "at-exit", SHARED.format(""), "", "memory.unlink()"),
    Pair("orphan-process", "child", CHILD.format(", stdout=-3, stderr=-3"), "", ENDED),
    Pair("orphan-process", "holds-the-pipe", CHILD.format(""), "", ENDED),
    Pair("orphan-process", "daemon", DAEMON, "60", "0.1"),
    Pair("process-group-not-destroyed", "asked", GROUP, "True", "False"),
    Pair("process-group-not-destroyed", "of-a-fork", GROUP + OF_A_FORK, "False", "True"),
    Pair("process-group-not-destroyed", "said", SAYS_NCCL, "", "never seen: "),
    Pair("cuda-ipc", "said", SAYS_IPC, "", "never seen: "),
    Pair("resource-warning", "file", FILE, "", "f.close()", WARN),
]

# Programs of several processes.

START = """
import multiprocessing
def work(): Resource()
if __name__ == "__main__":
    process = multiprocessing.get_context("{}").Process(target=work)
    process.start()
    process.join()
"""
AGAIN = """
import os, sys
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""

ATTRIBUTED = [
    *(
        Pair("unraisable", method, CLASS + START.format(method))
        for method in ("spawn", "forkserver", "fork")
    ),
    Pair("unraisable", "exec-of-itself", AGAIN + NOW),
]

CORPUS = [*ERRORS, *CALLBACKS, *ENDINGS, *LEFT_BEHIND, *ATTRIBUTED]

# Nothing is wrong with these, whatever they print.
CLEAN = {
    "logs wrong arguments in the main module": "import logging\nlogging.error('%s %s', 1)\n",
    "logs errors at exit": """
        import atexit, logging
        logging.getLogger("asyncio").addHandler(logging.StreamHandler())
        atexit.register(logging.error, "the upload failed")
        atexit.register(logging.getLogger("asyncio").warning, "slow")
    """,
    "loses a message in silence": "import logging\nlogging.raiseExceptions = False\n"
    + LOG_AT_EXIT.replace("FAULT", "stream.close()"),
    "names a session": WRITE.format("Unclosed client session\nclient_session: the first one"),
    "quotes the phrase on stdout": "print('Exception ignored in: <function A.__del__>')\n",
    "quotes the phrase on stderr": WRITE.format("Exception ignored in: see the manual"),
    "prints a caught traceback": """
        import traceback
        try: 1 / 0
        except ZeroDivisionError: traceback.print_exc()
        """,
    "ends with a code above 240": "raise SystemExit(256 - 6)",
    "has a daemon thread": WAITING_THREAD.format("60").replace("(60,)", "(60,), daemon=True"),
    "handles errors of threads itself": "import threading\n"
    "threading.excepthook = lambda args: None\n" + THREAD.replace("FAULT", "1 / 0"),
}
