"""How the program ends: exceptions, exit codes, signals, closed streams."""

from __future__ import annotations

from acceptance.hazards.row import TRACEBACK, Row

ENDINGS = [
    Row(
        "26 unhandled exception",
        """
        x = make()
        1 / 0
        """,
        returncode=1,
        stderr=TRACEBACK.format("ZeroDivisionError: division by zero"),
    ),
    Row(
        "27 sys.exit(3)",
        """
        import sys
        x = make()
        sys.exit(3)
        """,
        returncode=3,
    ),
    Row(
        "28 SIGINT in main",
        """
        import os, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        x = make()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        """,
        returncode=-2,
        stderr=TRACEBACK.format("KeyboardInterrupt"),
    ),
    Row(
        "29 SIGINT while joining",
        """
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
        """,
        # What the interpreter itself prints about the interrupted join, in its dialects.
        stderr=r"(Exception ignored in: <module 'threading'.*\n|Exception ignored on threading "
        r"shutdown.*\n)?(Traceback .*\n)?(  .*\n)*(KeyboardInterrupt:? ?\n?)?",
    ),
    Row(
        "30 SIGTERM, default",
        """
        import os, signal, time
        x = make()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        """,
        returncode=-15,
        released=0,
        control=False,
    ),
    Row(
        "30 SIGTERM, exit_on_signals",
        """
        import os, signal, time
        from torch_utils import exit_on_signals
        exit_on_signals()
        x = make()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        """,
        returncode=143,
    ),
    Row(
        "30 os._exit",
        """
        import os
        x = make()
        os._exit(4)
        """,
        returncode=4,
        released=0,
        control=False,
    ),
    Row(
        "31 crash in atexit",
        """
        import atexit
        x = make()
        atexit.register(lambda: 1 / 0)
        """,
        stderr=r"(Exception ignored in atexit callback.*\n|Error in atexit.*\n)"
        + TRACEBACK.format("ZeroDivisionError: division by zero"),
    ),
    Row(
        "32 stdout closed",
        """
        import sys
        x = make()
        sys.stdout.close()
        """,
    ),
    Row(
        "32 stdout's descriptor closed",
        """
        import os
        x = make()
        os.close(1)
        """,
    ),
    Row(
        "33 stderr closed",
        """
        import sys
        x = make()
        sys.stderr.close()
        """,
    ),
]
