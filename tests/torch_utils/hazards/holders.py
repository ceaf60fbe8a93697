"""Where the object is kept when the program ends: what keeps it alive into the teardown.

One place for each way in which the teardown reaches an object, or never does.
"""

from tests.torch_utils.hazards.row import Row

MODULES = ("builtins", "sys", "torch")
WITHOUT_TORCH = {
    "main global": "x = make()",
    "user module": """
        import sys, types
        m = types.ModuleType("user")
        sys.modules["user"] = m
        m.x = make()
        del m
    """,
    "module that survives": """
        import sys, types
        m = types.ModuleType("user")
        m.me = sys.kept = m
        m.x = make()
    """,
    "excepthook": """
        import sys
        x = make()
        sys.excepthook = lambda *a: x
    """,
    "cycle, gc off": """
        import gc
        gc.disable()
        x = make()
        c = [x]
        c.append(c)
        del x, c
    """,
    "frozen cycle": """
        import gc
        x = make()
        c = [x]
        c.append(c)
        del x, c
        gc.freeze()
    """,
    "thread-local": """
        import threading
        t = threading.local()
        t.x = make()
    """,
    "daemon thread's frame": """
        import threading, time
        def f():
            x = make()
            ready.set()
            time.sleep(100)
        ready = threading.Event()
        threading.Thread(target=f, daemon=True).start()
        ready.wait()
    """,
    "at-fork hook": "import os\nos.register_at_fork(before=lambda x=make(): None)",
    "suspended generator": """
        def g():
            x = make()
            yield
        g = g()
        next(g)
    """,
    "leaked reference": """
        import ctypes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(make()))
    """,
}
DROPPED_CYCLE = "x = make()\nc = [x]\nc.append(c)\ndel x, c"
AUTOGRAD_HOOK = """
import torch
t = torch.ones(1, requires_grad=True)
t.register_hook(lambda g, x=make(): None)
torch.kept = t * 2
"""

PLACES = [
    *(
        Row(f"in {name}", f"import {name}\n{name}.x = make()", needs_torch=name == "torch")
        for name in MODULES
    ),
    *(Row(name, block) for name, block in WITHOUT_TORCH.items()),
    Row("dropped cycle", DROPPED_CYCLE, control=False),
    Row("autograd hook", AUTOGRAD_HOOK, needs_torch=True),
]
