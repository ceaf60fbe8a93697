"""How the program ends, what comes before what at its end, and releases that fail there."""

from tests.torch_utils.hazards.row import LIGHT, LOUD, TRACEBACK, Row

INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
x = make()
signal.raise_signal(signal.SIGINT)
"""
WHILE_JOINING = """
import os, signal, sys, threading, time
interrupted = threading.Event()
def interrupt(*arguments):
    interrupted.set()
    signal.default_int_handler(*arguments)
signal.signal(signal.SIGINT, interrupt)
x = make()
main = threading.get_ident()
def is_joining():
    frame = sys._current_frames().get(main)
    return frame is not None and frame.f_code.co_name == "_shutdown"
def f():
    while not is_joining(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    interrupted.wait(100)
threading.Thread(target=f).start()
"""
# What the interpreter itself prints about the interrupted join, in its dialects.
JOIN = (
    r"(Exception ignored (in: <module 'threading'|on threading shutdown|while joining a "
    r"thread).*\n)?(Traceback .*\n)?(  .*\n)*(KeyboardInterrupt:? ?\n?)?"
)
TERMINATED = "import signal\nx = make()\nsignal.raise_signal(signal.SIGTERM)"
ZERO = TRACEBACK.format("ZeroDivisionError: division by zero")
IN_ATEXIT = r"(Exception ignored in atexit callback.*\n|Error in atexit.*\n)"
AFTER = "import atexit\nx = make()\natexit.register(lambda: log('alive', is_alive(x)))"
BEFORE = "import atexit\natexit.register(lambda: log('called', 0))\nx = make()"
MADE_AT_EXIT = "import atexit\natexit.register(lambda: globals().update(x=make()))"
THREAD_IN_CLEANUP = """
import threading
def work():
    t = threading.Thread(target=int)
    t.start()
    t.join()
x = make(work)
"""
NO_THREAD = LOUD.format("RuntimeError: .*new thread at interpreter shutdown")
WAITS = """
import threading
done = threading.Event()
x = make(done.set)
threading.Thread(target=done.wait, args=(0.1,)).start()
"""
DAEMON = """
import threading, time
x = make()
begun = threading.Event()
def f():
    while is_alive(x):
        begun.set()
        time.sleep(0.001)
threading.Thread(target=f, daemon=True).start()
assert begun.wait(100)
"""
FAIL = "def fail():\n    raise {}\n"
IN_A_CYCLE = "import gc\nc = [make(fail)]\nc.append(c)\ndel c\ngc.collect()"
WITH_A_LOCK = """
import gc, logging, threading
logging.basicConfig(level=60)
lock = threading.Lock()
c = [make()]
c.append(c)
del c
with lock, logging.getLogger().handlers[0].lock:
    gc.collect()
"""
ERROR = FAIL.format("ValueError('no')")
SAYS_ERROR = LOUD.format("ValueError: no")
# A resource is named by its class.
AT_EXIT = SAYS_ERROR.replace("in: .*", "in: <function .*Subject._release at .*")

ENDINGS = [
    Row("unhandled exception", "x = make()\n1 / 0", 1, ZERO),
    Row("sys.exit(3)", "import sys\nx = make()\nsys.exit(3)", 3, is_variation=True),
    Row("SIGINT in main", INTERRUPTED, -2, TRACEBACK.format("KeyboardInterrupt")),
    Row("SIGINT while joining", WHILE_JOINING, stderr=JOIN),
    Row("SIGTERM, default", TERMINATED, -15, released=0, control=False, is_variation=True),
    Row(
        "crash in atexit",
        "import atexit\nx = make()\natexit.register(lambda: 1 / 0)",
        stderr=IN_ATEXIT + ZERO,
        is_variation=True,
    ),
    Row("stdout closed", "import sys\nx = make()\nsys.stdout.close()", is_variation=True),
    Row("stderr closed", "import sys\nx = make()\nsys.stderr.close()", is_variation=True),
    Row("atexit callback after the library", AFTER),
    Row("atexit callback before the library", BEFORE, own_process=True, late=True),
    Row("made in an atexit callback", MADE_AT_EXIT),
    Row(
        "library before torch",
        "x = make()\nimport torch",
        needs_torch=True,
        own_process=True,
        subjects=LIGHT,
        control=False,
        is_variation=True,
    ),
    # The exit callback comes too late then, so only destructors release. No "host": what
    # unloads its model lives in modules that are torn down before it.
    Row(
        "library first imported in atexit",
        MADE_AT_EXIT,
        own_process=True,
        subjects=("resource", "scope"),
        late=True,
        is_variation=True,
    ),
    # Python 3.12.1 starts no thread at exit.
    Row("thread used in cleanup", THREAD_IN_CLEANUP, stderr=f"({NO_THREAD})?", is_variation=True),
    Row("thread waits for a release", WAITS, is_variation=True),
    Row("daemon thread uses it", DAEMON),
    Row("raises at exit", ERROR + "x = make(fail)", stderr=AT_EXIT),
    Row("raises during gc", ERROR + IN_A_CYCLE, stderr=SAYS_ERROR, control=False),
    Row(
        "raises SystemExit, others follow",
        FAIL.format("SystemExit") + "x = [make(), make(fail), make()]",
        stderr=f"({LOUD.format('SystemExit:? ?')})+",  # A host's model is logged too.
    ),
    Row("-W error", "x = make()", options=("-W", "error"), is_variation=True),
    Row("gc while a lock is held", WITH_A_LOCK, control=False),
]
