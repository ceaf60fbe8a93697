"""Dirty files: imports and globals, by every way of being reached."""

from __future__ import annotations

DIRTY_REACHED = {
    "import in __del__": """
class A:
    def __del__(self):
        import os  # <- import
        os.getpid()
""",
    "import behind a handler": """
class A:
    def __del__(self):
        try:
            from shutil import rmtree  # <- import
            rmtree("x")
        except ImportError:
            pass
""",
    "importlib": """
import importlib
class A:
    def __del__(self):
        importlib.import_module("json").dumps(1)  # <- import global
""",
    "import through methods": """
class A:
    def __del__(self):
        self.close()
    def close(self):
        self._flush()
    def _flush(self):
        import json  # <- import
        json.dumps({})
""",
    "import by a lazy property": """
class A:
    @property
    def torch(self):
        import torch  # <- import
        return torch
    def __del__(self):
        self.torch.clear_autocast_cache()
""",
    "the guard the wrong way round": """
import sys
class A:
    def __del__(self):
        if sys.is_finalizing():
            import gc  # <- import
            gc.disable()
""",
    "__del__ = close": """
class A:
    def close(self):
        import os  # <- import
        os.getpid()
    __del__ = close
""",
    "__del__ is assigned from outside": """
class A:
    pass
def _gone(self):
    import os  # <- import
A.__del__ = _gone
""",
    "a lambda": """
import os
class A:
    fd = -1
    __del__ = lambda self: os.close(self.fd)  # <- global
""",
    "a mixin's close": """
class Closing:
    def __del__(self):
        self.close()
class Loud:
    def close(self):
        print("closing")  # <- log
class A(Closing, Loud):
    pass
""",
    "inherited and overridden": """
class Base:
    def __del__(self):
        self.close()
    def close(self):
        pass
class Child(Base):
    def close(self):
        super().close()
        raise OSError("again")  # <- raise
""",
    "an attribute whose class is known from __init__": """
class Client:
    def stop(self):
        import socket  # <- import
class A:
    def __init__(self):
        self.client = Client()
    def __del__(self):
        self.client.stop()
""",
    "an attribute whose class is known from an annotation": """
from __future__ import annotations
from typing import Optional
class Client:
    def stop(self):
        import socket  # <- import
class A:
    client: Optional["Client"] = None
    def __del__(self):
        if self.client is not None:
            self.client.stop()
""",
    "a parameter's annotation": """
class Client:
    def stop(self) -> None:
        assert self  # <- raise
class A:
    client = None
    def __init__(self, client: Client | None):
        self.client = client
    def __del__(self):
        if client := self.client:
            client.stop()
""",
    "partial": """
import functools
def _shut(what):
    import os  # <- import
class A:
    def __init__(self):
        self._end = functools.partial(_shut, 1)
    def __del__(self):
        self._end()
""",
    "a closure": """
def make():
    def shut():
        print("gone")  # <- log
    class A:
        def __del__(self):
            shut()
    return A
""",
    "a conditional definition": """
import os
if os.name == "posix":
    class A:
        fd = -1
        def __del__(self):
            os.close(self.fd)  # <- global
else:
    class A:
        pass
""",
    "a nested class": """
import shutil
class Outer:
    class Inner:
        path = "x"
        def __del__(self):
            shutil.rmtree(self.path)  # <- global
""",
    "global by from import": """
from os import close as _close
class A:
    fd = -1
    def __del__(self):
        _close(self.fd)  # <- global
""",
    "a global class": """
class Registry:
    items = set()
class A:
    def __del__(self):
        Registry.items.discard(id(self))  # <- global
""",
    "a global that is counted": """
COUNT = 0
class A:
    def __del__(self):
        global COUNT
        COUNT -= 1  # <- global
""",
    "the guard of another name": """
import os, sys
class A:
    fd = -1
    def __del__(self):
        if sys is not None:
            os.close(self.fd)  # <- global
""",
}
