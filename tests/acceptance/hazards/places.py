"""Where the object is kept when the program ends: what keeps it alive into the teardown."""

from __future__ import annotations

from acceptance.hazards.row import Row

PLACES = [
    Row(
        "01 main global",
        "x = make()",
    ),
    Row(
        "02 underscore global",
        "_x = make()",
    ),
    Row(
        "03 user module",
        """
        import sys, types
        m = types.ModuleType("user")
        sys.modules["user"] = m
        m.x = make()
        del m
        """,
    ),
    Row(
        "04 builtins",
        """
        import builtins
        builtins.x = make()
        """,
    ),
    Row(
        "05 sys",
        """
        import sys
        sys.x = make()
        """,
    ),
    Row(
        "06 torch",
        """
        import torch
        torch.x = make()
        """,
        needs_torch=True,
    ),
    Row(
        "07 torch.cuda",
        """
        import torch
        torch.cuda.x = make()
        """,
        needs_torch=True,
    ),
    Row(
        "08 logging",
        """
        import logging
        logging.x = make()
        """,
    ),
    Row(
        "08 threading",
        """
        import threading
        threading.x = make()
        """,
    ),
    Row(
        "08 os",
        """
        import os
        os.x = make()
        """,
    ),
    Row(
        "09 module that survives",
        """
        import sys, types
        m = types.ModuleType("user")
        m.me = sys.kept = m
        m.x = make()
        """,
    ),
    Row(
        "10 excepthook",
        """
        import sys
        x = make()
        sys.excepthook = lambda *a: x
        """,
    ),
    Row(
        "11 unraisablehook",
        """
        import sys
        x = make()
        sys.unraisablehook = lambda error, x=x: sys.__unraisablehook__(error)
        """,
    ),
    Row(
        "12 cycle",
        """
        x = make()
        c = [x]
        c.append(c)
        """,
    ),
    Row(
        "12 cycle, dropped",
        """
        x = make()
        c = [x]
        c.append(c)
        del x, c
        """,
        control=False,
    ),
    Row(
        "13 cycle, gc off",
        """
        import gc
        gc.disable()
        x = make()
        c = [x]
        c.append(c)
        del x, c
        """,
    ),
    Row(
        "14 frozen",
        """
        import gc
        x = make()
        c = [x]
        c.append(c)
        del x, c
        gc.freeze()
        """,
    ),
    Row(
        "15 thread-local",
        """
        import threading
        t = threading.local()
        t.x = make()
        """,
    ),
    Row(
        "16 daemon thread's frame",
        """
        import threading, time
        def f():
            x = make()
            ready.set()
            time.sleep(100)
        ready = threading.Event()
        threading.Thread(target=f, daemon=True).start()
        ready.wait()
        """,
    ),
    Row(
        "17 codecs",
        """
        import codecs
        codecs.register(lambda name, x=make(): None)
        """,
    ),
    Row(
        "18 at-fork hook",
        """
        import os
        os.register_at_fork(before=lambda x=make(): None)
        """,
    ),
    Row(
        "19 context variable",
        """
        import contextvars
        v = contextvars.ContextVar("v")
        v.set(make())
        """,
    ),
    Row(
        "20 lru_cache",
        """
        import functools
        @functools.lru_cache
        def f():
            return make()
        f()
        """,
    ),
    Row(
        "20 default argument",
        """
        def f(x=make()):
            pass
        """,
    ),
    Row(
        "20 class attribute",
        """
        class C:
            x = make()
        """,
    ),
    Row(
        "21 suspended generator",
        """
        def g():
            x = make()
            yield
        g = g()
        next(g)
        """,
    ),
    Row(
        "22 traceback",
        """
        import sys
        def f():
            x = make()
            1 / 0
        try:
            f()
        except ZeroDivisionError as e:
            sys.kept = e
        """,
    ),
    Row(
        "23 ctypes callback",
        """
        import ctypes
        x = make()
        f = ctypes.CFUNCTYPE(None)(lambda x=x: None)
        ctypes.kept = f
        """,
    ),
    Row(
        "23 leaked reference",
        """
        import ctypes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(make()))
        """,
    ),
    Row(
        "24 tensor attribute",
        """
        import torch
        t = torch.ones(1)
        t.x = make()
        """,
        needs_torch=True,
        control=False,
    ),
    Row(
        "24 autograd hook",
        """
        import torch
        t = torch.ones(1, requires_grad=True)
        t.register_hook(lambda g, x=make(): None)
        torch.kept = t * 2
        """,
        needs_torch=True,
    ),
    Row(
        "24 global forward hook",
        """
        import torch.nn.modules.module as m
        m.register_module_forward_hook(lambda *a, x=make(): None)
        """,
        needs_torch=True,
    ),
    Row(
        "24 torch.library",
        """
        import torch
        lib = torch.library.Library("hazard", "DEF")
        lib.define("op(Tensor t) -> Tensor")
        lib.impl("op", lambda t, x=make(): t, "CPU")
        """,
        needs_torch=True,
    ),
    Row(
        "25 logging handler",
        """
        import logging
        class H(logging.Handler):
            def emit(self, record):
                pass
        h = H()
        h.x = make()
        logging.getLogger().addHandler(h)
        del h
        """,
    ),
]
