"""Clean files: every kind of guard."""

from __future__ import annotations

CLEAN_GUARDS = {
    "a finalizer with a plain function": """
import os, weakref
class A:
    def __init__(self, path):
        self.fd = os.open(path, os.O_RDONLY)
        self._finalizer = weakref.finalize(self, os.close, self.fd)
    def close(self):
        self._finalizer()
""",
    "a finalizer with a static method": """
import weakref
class A:
    def __init__(self, loop):
        self.loop = loop
        weakref.finalize(self, self._shut, loop, self.loop)
        weakref.finalize(self, type(self)._shut, loop)
        weakref.finalize(self, A._shut, loop)
    @staticmethod
    def _shut(loop, again=None):
        loop.close()
""",
    "a finalizer with a method of something else": """
import tempfile, weakref
class A:
    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        weakref.finalize(self, self._folder.cleanup)
""",
    "a finalizer with a weak reference": """
import weakref
class A:
    def __init__(self):
        ref = weakref.ref(self)
        def shut(ref=ref):
            if (me := ref()) is not None:
                me.x = 1
        weakref.finalize(self, shut)
        weakref.finalize(self, lambda fd=self.fd: print(fd))
        weakref.finalize(self, print, weakref.ref(self))
    fd = 3
""",
    "getattr with a default": """
class A:
    def __init__(self, path):
        self.file = open(path)
    def __del__(self):
        file = getattr(self, "file", None)
        if file is not None:
            file.close()
""",
    "hasattr": """
class A:
    def __init__(self, path):
        self.file = open(path)
    def __del__(self):
        if hasattr(self, "file"):
            self.file.close()
""",
    "hasattr of what is set last": """
class A:
    def __init__(self, path):
        self.name = str(path)
        self.file = open(path)
        self.ready = True
    def __del__(self):
        if not hasattr(self, "ready"):
            return
        self.file.close()
        self.name = None
""",
    "__dict__": """
class A:
    def __init__(self, path):
        self.file = open(path)
        self.other = open(path)
    def __del__(self):
        if "file" in self.__dict__:
            self.file.close()
        if self.__dict__.get("other"):
            self.other.close()
""",
    "a walrus": """
class A:
    def __init__(self, path):
        self.file = open(path)
        self.size = 3
    def __del__(self):
        if (file := getattr(self, "file", None)) is not None and not file.closed:
            file.close()
            self.file.closed
""",
    "class-level defaults": """
class A:
    file = None
    def __init__(self, path):
        self.file = open(path)
    def __del__(self):
        if self.file is not None:
            self.file.close()
""",
    "set first": """
class A:
    def __init__(self, path):
        self.file = None
        self.items = []
        self.file = open(path)
    def __del__(self):
        self.items.clear()
        if self.file:
            self.file.close()
""",
    "the flag that is set last": """
class A:
    _is_open = False
    def __init__(self, path):
        self.file = open(path)
        self._is_open = True
    def __del__(self):
        if not self._is_open:
            return
        self.file.close()
""",
    "AttributeError is caught": """
class A:
    def __init__(self, path):
        self.file = open(path)
    def __del__(self):
        try:
            self.file.close()
        except AttributeError:
            pass
""",
    "everything is caught": """
import os
class A:
    def __init__(self, path):
        self.fd = os.open(path, 0)
    def __del__(self):
        try:
            os.close(self.fd)
        except Exception:
            pass
""",
    "default arguments": """
import os, warnings
class A:
    fd = -1
    def __del__(self, _close=os.close, _warn=warnings.warn, *, _error=OSError):
        if self.fd >= 0:
            _close(self.fd)
            _warn("unclosed", ResourceWarning, source=self)
""",
    "a class attribute": """
import os
class A:
    _close = staticmethod(os.close)
    _os = os
    fd = -1
    def __del__(self):
        self._close(self.fd)
        self._os.getpid()
""",
    "is_finalizing, first": """
import os, sys
class A:
    fd = -1
    def __del__(self):
        if sys.is_finalizing():
            return
        os.close(self.fd)
        import json
""",
    "is_finalizing, inverted, and in and": """
import os, sys
class A:
    fd = -1
    def __del__(self):
        if self.fd >= 0 and not sys.is_finalizing():
            os.close(self.fd)
""",
    "is_finalizing behind a guard": """
import os, sys
class A:
    fd = -1
    def __del__(self):
        if sys is None or sys.is_finalizing():
            return
        self.close()
    def close(self):
        os.close(self.fd)
""",
    "is_finalizing, bound early": """
import os, sys
class A:
    fd = -1
    def __del__(self, _is_finalizing=sys.is_finalizing):
        if not _is_finalizing():
            os.close(self.fd)
""",
    "sys.meta_path": """
import os, sys
class A:
    fd = -1
    def __del__(self):
        if sys.meta_path is None:
            return
        os.close(self.fd)
""",
    "names that are compared with None": """
import os
_registry = {}
class A:
    fd = -1
    def __del__(self):
        if os is not None:
            os.close(self.fd)
        if _registry:
            _registry.pop(id(self), None)
        x = os.getpid() if os is not None else 0
        return _registry and _registry.clear()
""",
    "a resource": """
from torch_utils import Resource, release
class Index(Resource):
    def __init__(self, path):
        self.handle = open(path)
    def _release(self):
        release(self.handle)
        import os
""",
}
