"""Where the object is kept when the program ends: what keeps it alive into the teardown."""

from __future__ import annotations

from tests.torch_utils.hazards.row import Row

MODULES = {
    "04": "builtins",
    "05": "sys",
    "06": "torch",
    "07": "torch.cuda",
    "08": "threading",
}
WITHOUT_TORCH = {
    "03 user module": """
        import sys, types
        m = types.ModuleType("user")
        sys.modules["user"] = m
        m.x = make()
        del m
    """,
    "09 module that survives": """
        import sys, types
        m = types.ModuleType("user")
        m.me = sys.kept = m
        m.x = make()
    """,
    "10 excepthook": """
        import sys
        x = make()
        sys.excepthook = lambda *a: x
    """,
    "11 unraisablehook": """
        import sys
        x = make()
        sys.unraisablehook = lambda error, x=x: sys.__unraisablehook__(error)
    """,
    "12 cycle": """
        x = make()
        c = [x]
        c.append(c)
    """,
    "13 cycle, gc off": """
        import gc
        gc.disable()
        x = make()
        c = [x]
        c.append(c)
        del x, c
    """,
    "14 frozen": """
        import gc
        x = make()
        c = [x]
        c.append(c)
        del x, c
        gc.freeze()
    """,
    "15 thread-local": """
        import threading
        t = threading.local()
        t.x = make()
    """,
    "16 daemon thread's frame": """
        import threading, time
        def f():
            x = make()
            ready.set()
            time.sleep(100)
        ready = threading.Event()
        threading.Thread(target=f, daemon=True).start()
        ready.wait()
    """,
    "17 codecs": "import codecs\ncodecs.register(lambda name, x=make(): None)",
    "18 at-fork hook": "import os\nos.register_at_fork(before=lambda x=make(): None)",
    "19 context variable": """
        import contextvars
        v = contextvars.ContextVar("v")
        v.set(make())
    """,
    "20 lru_cache": """
        import functools
        @functools.lru_cache
        def f():
            return make()
        f()
    """,
    "20 class attribute": "class C:\n    x = make()",
    "21 suspended generator": """
        def g():
            x = make()
            yield
        g = g()
        next(g)
    """,
    "22 traceback": """
        import sys
        def f():
            x = make()
            1 / 0
        try:
            f()
        except ZeroDivisionError as e:
            sys.kept = e
    """,
    "23 ctypes callback": """
        import ctypes
        x = make()
        f = ctypes.CFUNCTYPE(None)(lambda x=x: None)
        ctypes.kept = f
    """,
    "23 leaked reference": """
        import ctypes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(make()))
    """,
    "25 logging handler": """
        import logging
        class H(logging.Handler):
            def emit(self, record):
                pass
        h = H()
        h.x = make()
        logging.getLogger().addHandler(h)
        del h
    """,
}
WITH_TORCH = {
    "24 autograd hook": """
        import torch
        t = torch.ones(1, requires_grad=True)
        t.register_hook(lambda g, x=make(): None)
        torch.kept = t * 2
    """,
    "24 global forward hook": """
        import torch.nn.modules.module as m
        m.register_module_forward_hook(lambda *a, x=make(): None)
    """,
    "24 torch.library": """
        import torch
        lib = torch.library.Library("hazard", "DEF")
        lib.define("op(Tensor t) -> Tensor")
        lib.impl("op", lambda t, x=make(): t, "CPU")
    """,
}
DROPPED = "x = make()\nc = [x]\nc.append(c)\ndel x, c"
ON_A_TENSOR = "import torch\nt = torch.ones(1)\nt.x = make()"

PLACES = [
    Row("01 main global", "x = make()"),
    *(
        Row(f"{number} {name}", f"import {name}\n{name}.x = make()", needs_torch="torch" in name)
        for number, name in MODULES.items()
    ),
    *(Row(name, block) for name, block in WITHOUT_TORCH.items()),
    *(Row(name, block, needs_torch=True) for name, block in WITH_TORCH.items()),
    Row("12 cycle, dropped", DROPPED, control=False),
    Row("24 tensor attribute", ON_A_TENSOR, needs_torch=True, control=False),
]
