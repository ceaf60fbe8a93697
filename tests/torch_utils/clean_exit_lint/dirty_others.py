"""Dirty files: registrations, calls by hand, what keeps alive, coroutines, handlers, new syntax."""

from __future__ import annotations

DIRTY_OTHERS = {
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
