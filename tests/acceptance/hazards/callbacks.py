"""Releases that fail, come twice, or come at a bad moment."""

from __future__ import annotations

from acceptance.hazards.row import LOUD, Row

CALLBACKS = [
    Row(
        "41 raises at exit",
        """
        def fail():
            raise ValueError("no")
        x = make(fail)
        """,
        stderr=LOUD.format("ValueError: no"),
    ),
    Row(
        "42 raises during gc",
        """
        def fail():
            raise ValueError("no")
        import gc
        x = make(fail)
        c = [x]
        c.append(c)
        del x, c
        gc.collect()
        """,
        stderr=LOUD.format("ValueError: no"),
        control=False,
    ),
    Row(
        "43 raises SystemExit, others follow",
        """
        def fail():
            raise SystemExit(9)
        x = [make(), make(fail), make()]
        """,
        stderr=f"({LOUD.format('SystemExit: 9')})+",  # What a host's model raises is logged too.
    ),
    Row(
        "43 raises KeyboardInterrupt, others follow",
        """
        def fail():
            raise KeyboardInterrupt
        x = [make(), make(fail), make()]
        """,
        stderr=f"({LOUD.format('KeyboardInterrupt:? ?')})+",
    ),
    Row(
        "44 -W error",
        "x = make()",
        options=("-W", "error"),
    ),
    Row(
        "44 -W error, closed",
        """
        x = make()
        close(x)
        del x
        """,
        options=("-W", "error"),
    ),
    Row(
        "45 gc while a lock is held",
        """
        import gc, logging, threading
        logging.basicConfig(level=60)
        lock = threading.Lock()
        x = make()
        c = [x]
        c.append(c)
        del x, c
        with lock, logging.getLogger().handlers[0].lock:
            gc.collect()
        """,
        control=False,
    ),
    Row(
        "46 fails while an exception is in flight",
        """
        def fail():
            raise ValueError("cleanup")
        import contextlib
        try:
            with contextlib.ExitStack() as stack:
                stack.push(make(fail))  # A scope is entered already.
                raise KeyError("mine")
        except KeyError as e:
            assert e.args == ("mine",) and e.__cause__ is None
        """,
        # The log of a scope or a host, which shows the exception in flight as the context.
        stderr=r"(releasing .* failed: .*\n(.*\n)*ValueError: cleanup\n)?",
        control=False,
    ),
    Row(
        "47 closed twice",
        """
        x = make()
        close(x)
        close(x)
        """,
    ),
    Row(
        "47 closed from two threads",
        """
        import threading, time
        x = make(lambda: time.sleep(0.1))
        ts = [threading.Thread(target=close, args=(x,)) for _ in range(2)]
        [t.start() for t in ts]
        [t.join() for t in ts]
        """,
    ),
    Row(
        "47 closed by a signal handler",
        """
        import os, signal
        x = make(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        signal.signal(signal.SIGUSR1, lambda *a: close(x))
        close(x)
        """,
    ),
    Row(
        "48 closed, then exit",
        """
        x = make()
        close(x)
        """,
    ),
    Row(
        "48 closed, then dropped",
        """
        import gc
        x = make()
        close(x)
        del x
        gc.collect()
        """,
    ),
]
