"""Where the object is kept when the program ends: what keeps it alive into the teardown.

One place for each way in which the teardown reaches an object, or never does.
"""

from tests.torch_utils.hazards.row import Row

QUICK = {
    "main global": "x = make()",
    "in sys": "import sys\nsys.x = make()",
    "cycle, gc off": """
        import gc
        gc.disable()
        c = [make()]
        c.append(c)
        del c
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
    "leaked reference": "import ctypes\nctypes.pythonapi.Py_IncRef(ctypes.py_object(make()))",
}
SLOW = {
    "in builtins": "import builtins\nbuiltins.x = make()",
    "thread-local": "import threading\nt = threading.local()\nt.x = make()",
    "at-fork hook": "import os\nos.register_at_fork(before=lambda x=make(): None)",
    "suspended generator": """
        def g():
            x = make()
            yield
        g = g()
        next(g)
    """,
}
AUTOGRAD_HOOK = """
import torch
t = torch.ones(1, requires_grad=True)
t.register_hook(lambda g, x=make(): None)
torch.kept = t * 2
"""

PLACES = [
    *(Row(name, block) for name, block in QUICK.items()),
    *(Row(name, block, is_variation=True) for name, block in SLOW.items()),
    Row("dropped cycle", "c = [make()]\nc.append(c)\ndel c", control=False),
    Row("autograd hook", AUTOGRAD_HOOK, needs_torch=True),
]
