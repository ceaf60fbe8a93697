"""Files with destructors that cannot work: each with the rules, and lines, that have to be found.

A line that has to be found ends with ``# <- rule``, or with several of them.
"""

from __future__ import annotations

DIRTY = {
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
    "half-built after open": """
class A:
    def __init__(self, path):
        self.path = path
        self.file = open(path)
    def __del__(self):
        self.file.close()  # <- half-built
""",
    "half-built after a check": """
class A:
    def __init__(self, size):
        if size < 0:
            raise ValueError(size)
        self.size = size
    def __del__(self):
        self.size = self.size - 1  # <- half-built
""",
    "half-built in a dataclass": """
from dataclasses import dataclass
@dataclass
class A:
    path: str
    def __post_init__(self):
        self.handle = open(self.path)
    def __del__(self):
        self.handle.close()  # <- half-built
""",
    "half-built with slots": """
class A:
    __slots__ = ("fd", "name")
    def __init__(self, name):
        self.name = name
        self.fd = self._open(name)
    def _open(self, name):
        return int(name)
    def __del__(self):
        if self.fd >= 0:  # <- half-built
            self.name = None
""",
    "half-built after the base's __init__": """
class Base:
    def __init__(self, path):
        with open(path) as file:
            self.text = file.read()
class A(Base):
    def __init__(self, path):
        super().__init__(path)
        self.lock = None
    def __del__(self):
        self.lock = self.lock or 1  # <- half-built
""",
    "half-built, private": """
class A:
    def __init__(self, path):
        self.__file = open(path)
    def __del__(self):
        self.__file.close()  # <- half-built
""",
    "half-built only in start": """
class A:
    def __init__(self):
        self.name = "a"
    def start(self):
        self.task = object()
    def __del__(self):
        print(self.task)  # <- half-built log
""",
    "half-built where one branch sets it": """
class A:
    def __init__(self, path=None):
        if path:
            self.file = path
    def __del__(self):
        self.file.close()  # <- half-built
""",
    "half-built, generic": """
from typing import Generic, TypeVar
T = TypeVar("T")
class A(Generic[T]):
    def __init__(self, make):
        self.value: T = make()
        self.done = False
    def __del__(self):
        if not self.done:  # <- half-built
            self.done = True
""",
    "join": """
import threading
class A:
    def __init__(self):
        self.thread = threading.Thread(target=print)
    def __del__(self):
        self.thread.join()  # <- wait
""",
    "an executor": """
from concurrent.futures import ThreadPoolExecutor
class A:
    pool = None
    def __del__(self):
        if self.pool is not None:
            self.pool.shutdown()  # <- wait
""",
    "shutdown(wait=True)": """
class A:
    pool = None
    def __del__(self):
        self.pool.shutdown(wait=True)  # <- wait
""",
    "a lock": """
import threading
class A:
    _lock = threading.Lock()
    def __del__(self):
        with self._lock:  # <- wait
            self.x = 1
""",
    "acquire, result, wait": """
class A:
    lock = future = event = None
    def __del__(self):
        self.lock.acquire()  # <- wait
        self.future.result()  # <- wait
        self.event.wait()  # <- wait
""",
    "a lock under the guard": """
import sys
class A:
    mutex = None
    def __del__(self):
        if not sys.is_finalizing():
            with self.mutex:  # <- wait
                pass
""",
    "timeouts of None": """
class A:
    thread = None
    def __del__(self):
        self.thread.join(timeout=None)  # <- wait
""",
    "cuda": """
import torch
class A:
    def __del__(self):
        if torch.cuda.is_available():  # <- device global
            torch.cuda.empty_cache()  # <- device
""",
    "cuda by another name": """
import torch.cuda as tc
from torch.cuda import synchronize
class A:
    def __del__(self):
        tc.ipc_collect()  # <- device
        synchronize()  # <- device
""",
    "gc": """
import gc
class A:
    def __del__(self, _collect=gc.collect):
        _collect()  # <- device
""",
    "a runtime's own function": """
class A:
    _lib = None
    def __del__(self):
        self._lib.cudaFree(0)  # <- device
""",
    "logging": """
import logging
logger = logging.getLogger(__name__)
class A:
    def __del__(self):
        logger.debug("gone")  # <- log global
""",
    "a logger of its own": """
class A:
    def __init__(self, log):
        self._logger = log
    def __del__(self):
        self._logger.info("gone")  # <- log
""",
    "stderr": """
import sys
class A:
    def __del__(self):
        sys.stderr.write("gone")  # <- log
""",
    "raise and assert": """
class A:
    closed = False
    def __del__(self):
        assert self.closed  # <- raise
        raise RuntimeError("not closed")  # <- raise
""",
    "raise in what is called": """
class A:
    closed = False
    def __del__(self):
        self.close()
    def close(self):
        if self.closed:
            raise ValueError("closed twice")  # <- raise
""",
    "the wrong handler": """
class A:
    def __del__(self):
        try:
            raise KeyError("x")  # <- raise
        except ValueError:
            pass
""",
    "atexit": """
import atexit
class A:
    def __del__(self):
        atexit.register(print)  # <- register
""",
    "a thread": """
from threading import Thread
class A:
    def __del__(self):
        Thread(target=print).start()  # <- register
""",
    "a task": """
import asyncio
class A:
    async def aclose(self): ...
    def __del__(self):
        asyncio.create_task(self.aclose())  # <- register async
""",
    "submit": """
from concurrent.futures import ThreadPoolExecutor
class A:
    def __init__(self):
        self._executor = ThreadPoolExecutor(1)
    def __del__(self):
        self._executor.submit(print)  # <- register
""",
    "by hand": """
def drop(x):
    x.__del__()  # <- explicit-call
class B:
    def close(self):
        self.__del__()  # <- explicit-call
    def __del__(self):
        pass
""",
    "a finalizer of a bound method": """
import weakref
class A:
    def __init__(self):
        self._f = weakref.finalize(self, self.close)  # <- finalize-keeps-alive
    def close(self):
        pass
""",
    "a finalizer of a lambda": """
from weakref import finalize
class A:
    def __init__(self):
        self.fd = 3
        finalize(self, lambda: print(self.fd))  # <- finalize-keeps-alive
""",
    "a finalizer of a closure": """
import weakref
class A:
    def __init__(self):
        def shut():
            self.stop()
        weakref.finalize(self, shut)  # <- finalize-keeps-alive
    def stop(self):
        pass
""",
    "a finalizer that is given the object": """
import weakref, functools
class A:
    def __init__(self):
        weakref.finalize(self, A._shut, self)  # <- finalize-keeps-alive
        weakref.finalize(self, functools.partial(A._shut, self))  # <- finalize-keeps-alive
    @staticmethod
    def _shut(x):
        pass
""",
    "a finalizer of another object": """
import weakref
def watch(session):
    weakref.finalize(session, session.close)  # <- finalize-keeps-alive
""",
    "atexit of a bound method": """
import atexit
class A:
    def __init__(self):
        atexit.register(self.close)  # <- atexit-keeps-alive
    def close(self):
        pass
""",
    "atexit by a decorator": """
import atexit
class A:
    def __init__(self):
        @atexit.register  # <- atexit-keeps-alive
        def shut():
            self.close()
    def close(self):
        pass
""",
    "atexit of a lambda": """
from atexit import register
class A:
    def __init__(self):
        register(lambda: self.close())  # <- atexit-keeps-alive
    def close(self):
        pass
""",
    "async def __del__": """
class A:
    async def __del__(self):  # <- async
        await self.aclose()
    async def aclose(self): ...
""",
    "asyncio.run": """
import asyncio
class A:
    async def aclose(self): ...
    def __del__(self):
        asyncio.run(self.aclose())  # <- async
""",
    "a coroutine that is dropped": """
class A:
    async def close(self): ...
    def __del__(self):
        self.close()  # <- async
""",
    "run_until_complete": """
class A:
    loop = None
    async def close(self): ...
    def __del__(self):
        self.loop.run_until_complete(self.close())  # <- async
""",
    "bare except": """
class A:
    def __del__(self):
        try:
            self.close()
        except:  # <- bare-except
            pass
    def close(self): ...
""",
    "except BaseException, and suppress": """
import contextlib
class A:
    def __del__(self, suppress=contextlib.suppress):
        try:
            self.close()
        except BaseException:  # <- bare-except
            pass
        with suppress(BaseException):  # <- bare-except
            self.close()
    def close(self): ...
""",
    "match": """
class A:
    state = None
    def __del__(self):
        match self.state:
            case "open":
                import os  # <- import
            case _:
                pass
""",
    "a protocol": """
from typing import Protocol
class Closes(Protocol):
    def close(self) -> None: ...
class File:
    def close(self):
        print("x")  # <- log
class A:
    def __init__(self):
        self.file: Closes = File()
    def __del__(self):
        self.file.close()
""",
    "a type comment": """
class A:
    def __init__(self, path):
        # type: (str) -> None
        self.file = open(path)  # type: ignore
    def __del__(self):
        # type: () -> None
        self.file.close()  # <- half-built
""",
    "a decorated destructor": """
from typing import final
class A:
    @final
    def __del__(self):
        import os  # <- import
""",
    "by type(self)": """
class A:
    @classmethod
    def _drop(cls):
        print("x")  # <- log
    def __del__(self):
        type(self)._drop()
        self.__class__._drop()
""",
    "by a function that is given the object": """
class A:
    def __init__(self, path):
        self.file = open(path)
    def __del__(self, _shut=None):
        _close(self)  # <- global
def _close(a):
    a.file.close()  # <- half-built
""",
    "a tab and other characters": """
class Größe:
\tdef __del__(self):
\t\t"ä"; print("→ß")  # <- log
""",
}

NEEDS_312 = {
    "type parameters": """
class A[T]:
    def __init__(self, make):
        self.value: T = make()
    def __del__(self):
        self.value.close()  # <- half-built
type Pair[T] = tuple[T, T]
""",
}
