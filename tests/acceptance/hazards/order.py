"""What comes before what: exit callbacks, late imports, threads that are still at work."""

from __future__ import annotations

from acceptance.hazards.row import LIGHT, LOUD, UNLOADED, Row

ORDER = [
    Row(
        "34 atexit callback after the library",
        """
        import atexit
        x = make()
        atexit.register(lambda: log("alive", is_alive(x)))
        """,
    ),
    Row(
        "34 atexit callback before the library",
        """
        import atexit
        atexit.register(lambda: log("called", 0))
        x = make()
        """,
        own_process=True,
        late=True,
    ),
    Row(
        "35 made in an atexit callback",
        """
        import atexit
        atexit.register(lambda: globals().update(x=make()))
        """,
        # No "model": by then transformers cannot load one, for it uses an executor.
        subjects=UNLOADED,
    ),
    Row(
        "35 made in a callback from before the library",
        """
        import atexit
        atexit.register(lambda: globals().update(x=make()))
        first = make()
        close(first)
        """,
        own_process=True,
        subjects=UNLOADED,
        late=True,
    ),
    Row(
        "36 library before torch",
        """
        x = make()
        import torch
        """,
        needs_torch=True,
        own_process=True,
        subjects=LIGHT,
        control=False,
    ),
    Row(
        "36 library after torch",
        """
        import torch
        x = make()
        """,
        needs_torch=True,
        own_process=True,
        subjects=LIGHT,
        late=True,
        control=False,
    ),
    Row(
        "36 library without torch",
        """
        x = make()
        import sys
        assert "torch" not in sys.modules
        """,
        own_process=True,
        subjects=LIGHT,
    ),
    Row(
        "37 library first imported in atexit",
        """
        import atexit
        atexit.register(lambda: globals().update(x=make()))
        """,
        own_process=True,
        # Issue 38: the exit callback comes too late then, so only destructors release. No "host":
        # what unloads its model lives in modules that are torn down before it.
        subjects=("resource", "scope"),
        late=True,
    ),
    Row(
        "38 thread used in cleanup",
        """
        import threading
        def work():
            t = threading.Thread(target=int)
            t.start()
            t.join()
        x = make(work)
        """,
        # Python 3.12.1 starts no thread at exit.
        stderr=f"({LOUD.format('RuntimeError: .*new thread at interpreter shutdown')})?",
    ),
    Row(
        "38 executor used in cleanup",
        """
        import concurrent.futures as f
        pool = f.ThreadPoolExecutor(1)
        pool.submit(int).result()
        x = make(lambda: pool.submit(int).result())
        """,
        stderr=LOUD.format("RuntimeError: cannot schedule new futures after .*"),
    ),
    Row(
        "39 thread waits for a release",
        """
        import threading
        done = threading.Event()
        x = make(done.set)
        threading.Thread(target=done.wait, args=(0.5,)).start()
        """,
    ),
    Row(
        "40 daemon thread uses it",
        """
        import threading, time
        x = make()
        begun = threading.Event()
        def f():
            while is_alive(x):
                begun.set()
                time.sleep(0.001)
        threading.Thread(target=f, daemon=True).start()
        assert begun.wait(100)
        """,
    ),
    Row(
        "40 daemon thread embeds with it",
        """
        import threading
        x = make()
        begun = threading.Event()
        def f():
            while True:
                x.embed_query("cache")
                begun.set()
        threading.Thread(target=f, daemon=True).start()
        assert begun.wait(100)
        """,
        subjects=("model",),
        control=False,
    ),
    Row(
        "40 daemon thread searches in it",
        """
        import threading
        x = make()
        begun = threading.Event()
        def f():
            while True:
                x.search("cache")
                begun.set()
        threading.Thread(target=f, daemon=True).start()
        assert begun.wait(100)
        """,
        subjects=("retriever",),
        control=False,
    ),
]
