"""What comes before what: exit callbacks, late imports, threads that are still at work."""

from __future__ import annotations

from tests.torch_utils.hazards.row import LIGHT, LOUD, Row

BEFORE = """
import atexit
atexit.register(lambda: log("called", 0))
x = make()
"""
MADE_AT_EXIT = """
import atexit
atexit.register(lambda: globals().update(x=make()))
"""
THREAD_IN_CLEANUP = """
import threading
def work():
    t = threading.Thread(target=int)
    t.start()
    t.join()
x = make(work)
"""
EXECUTOR_IN_CLEANUP = """
import concurrent.futures as f
pool = f.ThreadPoolExecutor(1)
pool.submit(int).result()
x = make(lambda: pool.submit(int).result())
"""
WAITS = """
import threading
done = threading.Event()
x = make(done.set)
threading.Thread(target=done.wait, args=(0.5,)).start()
"""
DAEMON = """
import threading, time
x = make()
begun = threading.Event()
def f():
    while is_alive(x):
        {}
        begun.set()
        time.sleep(0.001)
threading.Thread(target=f, daemon=True).start()
assert begun.wait(100)
"""
ALONE = {"own_process": True, "subjects": LIGHT}
NO_THREAD = LOUD.format("RuntimeError: .*new thread at interpreter shutdown")
NO_FUTURE = LOUD.format("RuntimeError: cannot schedule new futures after .*")

ORDER = [
    Row(
        "34 atexit callback after the library",
        "import atexit\nx = make()\natexit.register(lambda: log('alive', is_alive(x)))",
    ),
    Row("34 atexit callback before the library", BEFORE, own_process=True, late=True),
    Row("35 made in an atexit callback", MADE_AT_EXIT),
    Row(
        "35 made in a callback from before the library",
        MADE_AT_EXIT + "first = make()\nclose(first)",
        own_process=True,
        late=True,
    ),
    Row(
        "36 library before torch",
        "x = make()\nimport torch",
        needs_torch=True,
        control=False,
        **ALONE,
    ),
    Row(
        "36 library after torch",
        "import torch\nx = make()",
        needs_torch=True,
        late=True,
        control=False,
        **ALONE,
    ),
    # Issue 38: the exit callback comes too late then, so only destructors release. No "host":
    # what unloads its model lives in modules that are torn down before it.
    Row(
        "37 library first imported in atexit",
        MADE_AT_EXIT,
        own_process=True,
        subjects=("resource", "scope"),
        late=True,
    ),
    # Python 3.12.1 starts no thread at exit.
    Row("38 thread used in cleanup", THREAD_IN_CLEANUP, stderr=f"({NO_THREAD})?"),
    Row("38 executor used in cleanup", EXECUTOR_IN_CLEANUP, stderr=NO_FUTURE),
    Row("39 thread waits for a release", WAITS),
    Row("40 daemon thread uses it", DAEMON.format("pass")),
    Row(
        "40 daemon thread searches in it",
        DAEMON.replace("is_alive(x)", "True").format("x.search('cache')"),
        subjects=("retriever",),
        control=False,
    ),
]
