"""How the program ends: exceptions, exit codes, signals, closed streams."""

from __future__ import annotations

from tests.torch_utils.hazards.row import TRACEBACK, Row

INTERRUPTED = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
x = make()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
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
TERMINATED = """
import os, signal, time
x = make()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
"""
ZERO = "ZeroDivisionError: division by zero"
IN_ATEXIT = r"(Exception ignored in atexit callback.*\n|Error in atexit.*\n)"
UNCAUGHT: dict[str, int] = {"released": 0, "control": False}

ENDINGS = [
    Row("26 unhandled exception", "x = make()\n1 / 0", 1, TRACEBACK.format(ZERO)),
    Row("27 sys.exit(3)", "import sys\nx = make()\nsys.exit(3)", 3),
    Row("28 SIGINT in main", INTERRUPTED, -2, TRACEBACK.format("KeyboardInterrupt")),
    Row("29 SIGINT while joining", WHILE_JOINING, stderr=JOIN),
    Row("30 SIGTERM, default", TERMINATED, -15, **UNCAUGHT),
    Row("30 os._exit", "import os\nx = make()\nos._exit(4)", 4, **UNCAUGHT),
    Row(
        "31 crash in atexit",
        "import atexit\nx = make()\natexit.register(lambda: 1 / 0)",
        stderr=IN_ATEXIT + TRACEBACK.format(ZERO),
    ),
    Row("32 stdout closed", "import sys\nx = make()\nsys.stdout.close()"),
    Row("32 stdout's descriptor closed", "import os\nx = make()\nos.close(1)"),
    Row("33 stderr closed", "import sys\nx = make()\nsys.stderr.close()"),
]
