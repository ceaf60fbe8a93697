"""Clean files: what looks like a fault and is none."""

from __future__ import annotations

CLEAN_OTHERS = {
    "timeouts": """
class A:
    thread = pool = lock = event = future = None
    def __del__(self):
        self.thread.join(5)
        self.thread.join(timeout=1.5)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.pool.shutdown(False)
        self.future.result(timeout=1)
        if self.lock.acquire(timeout=1):
            self.lock.release()
        self.lock.acquire(blocking=False)
        self.lock.acquire(False)
        self.event.wait(0.1)
        "".join(["a"])
""",
    "a socket's shutdown": """
class A:
    sock = None
    how = 2
    def __del__(self):
        self.sock.shutdown(self.how)
""",
    "a killed process": """
class A:
    process = None
    def __del__(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
""",
    "raise that is caught": """
class A:
    def __del__(self):
        try:
            self.close()
        except (ValueError, OSError):
            pass
    def close(self):
        raise FileNotFoundError("x")
""",
    "an error of its own that is caught": """
class Error(Exception): ...
class Closed(Error): ...
class A:
    def __del__(self):
        try:
            self.close()
        except Error:
            pass
    def close(self):
        raise Closed("x")
""",
    "super().__del__()": """
class Base:
    def __del__(self): ...
class A(Base):
    def __del__(self):
        super().__del__()
""",
    "the base's __del__ by its name": """
class Base:
    def __del__(self): ...
class A(Base):
    def __del__(self, Base=Base):
        Base.__del__(self)
""",
    "atexit with what is not the object": """
import atexit, os
def _shut(): ...
class A:
    @classmethod
    def install(cls):
        atexit.register(cls.shut_all)
    @classmethod
    def shut_all(cls): ...
    def __init__(self):
        self.file = open("x")
        atexit.register(_shut)
        atexit.register(self.file.close)
        atexit.register(os.remove, "x")
""",
    "atexit that is taken back": """
import atexit
class A:
    def __init__(self):
        atexit.register(self.close)
    def close(self):
        atexit.unregister(self.close)
""",
    "atexit at the top": """
import atexit
class Pool:
    def close(self): ...
pool = Pool()
atexit.register(pool.close)
""",
    "handlers that name what they catch": """
class A:
    def __del__(self):
        try:
            self.close()
        except OSError:
            pass
        except Exception:
            self.failed = True
    failed = False
    def close(self): ...
""",
    "no destructor": """
import gc, logging, torch
log = logging.getLogger(__name__)
class A:
    def close(self):
        import os
        gc.collect()
        log.info("closed")
        torch.cuda.synchronize()
        self.thread.join()
        try:
            pass
        except:
            pass
""",
    "what is only named": '''
TEXT = """
class A:
    def __del__(self):
        import os
"""
# x.__del__()
def has_destructor(cls):
    return hasattr(cls, "__del__") and cls.__del__ is not None
''',
    "a destructor with a local import's name": """
class A:
    items = ()
    def __del__(self):
        for item in list(self.items):
            item.close()
        self.items = ()
        del self.items
""",
    "a parameter decides": """
class A:
    def __del__(self):
        self._stop(wait=False)
    def _stop(self, wait=True, message=None):
        if wait:
            import time
            time.sleep(1)
        if message is not None:
            print(message)
""",
    "what was tested before": """
class A:
    handle = None
    def __del__(self):
        if self.handle is not None:
            self.close()
    def close(self):
        if self.handle is None:
            raise ValueError("closed twice")
        self.handle = None
""",
    "an abstract method": """
class Base:
    def __del__(self):
        self.close()
    def close(self):
        raise NotImplementedError
""",
    "a coroutine that is handed over": """
class A:
    loop = None
    async def aclose(self): ...
    def __del__(self):
        self.closing = self.aclose
""",
    "a decorator that catches": """
import functools
def quiet(function):
    @functools.wraps(function)
    def wrapper(*args):
        try:
            return function(*args)
        except Exception:
            return None
    return wrapper
class A:
    def __init__(self, path):
        self.file = open(path)
    @quiet
    def __del__(self):
        self.file.close()
        raise ValueError
""",
    "suppress, bound early": """
import contextlib
class A:
    def __init__(self, path):
        self.file = open(path)
    def __del__(self, _suppress=contextlib.suppress):
        with _suppress(AttributeError):
            self.file.close()
""",
    "__getattr__": """
class A:
    def __init__(self, path):
        self.file = open(path)
    def __getattr__(self, name):
        return None
    def __del__(self):
        if self.file is not None:
            self.file.close()
""",
    "a dataclass": """
from dataclasses import dataclass, field
@dataclass
class A:
    fd: int
    items: list = field(default_factory=list)
    name: str = "a"
    def __del__(self):
        self.items.clear()
        self.name = str(self.fd)
""",
    "what cannot fail": """
import threading, weakref, collections, time
class A:
    def __init__(self, name="a", **kwargs):
        self.lock = threading.Lock()
        self.queue = collections.deque()
        self.started = time.monotonic()
        self.ref = weakref.ref(self)
        self.name = kwargs.get("name") or name.lower()
        self._setup()
    def _setup(self):
        self.done = False
    def __del__(self):
        if not self.done:
            self.queue.clear()
""",
    "try with else and finally": """
class A:
    def __init__(self, path):
        try:
            self.file = open(path)
        except OSError:
            self.file = None
            raise
        finally:
            self.tried = True
    def __del__(self):
        if self.tried:
            pass
""",
    "a generic base from elsewhere": """
import torch
class A(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = None
    def __del__(self):
        self.x = self.x or self.training
""",
    "what closed is, is ruled out": """
class A:
    def __init__(self, path, closed=False):
        self.closed = closed
        if closed:
            self.note = str(path)
            return
        try:
            self.fd = open(path)
            self.size = int(path)
        except Exception:
            self.closed = True
            raise
    def __del__(self):
        if hasattr(self, "closed") and not self.closed:
            self.close()
    def close(self):
        if self.closed:
            return
        self.closed = True
        assert self.closed
        self.fd.close()
        self.size += 1
""",
    "a property that reads it first": """
class A:
    def __init__(self, path):
        self.name = path
        self.file = open(path)
    @property
    def closed(self):
        return self.file.closed
    def __del__(self):
        try:
            closed = self.closed
        except AttributeError:
            return
        if not closed:
            self.file.close()
""",
    "a constant on its way": """
class A:
    thread = None
    def __del__(self):
        self._stop(timeout_s=1.0)
    def _stop(self, timeout_s=None):
        self._join(wait_s=timeout_s)
    def _join(self, wait_s):
        if wait_s is None:
            self.thread.join()
        else:
            self.thread.join(wait_s)
""",
    "arguments that are checked": """
class A:
    out = None
    def __del__(self):
        self._write(b"end")
    def _write(self, data):
        if not data or (len(data) > 255 and self.out):
            raise ValueError(data)
        self.out = data
""",
    "getattr with a default that is true": """
class A:
    def __init__(self, path, disable=False):
        if disable:
            self.disable = disable
            open(path).close()
            return
        self.file = None
        self.disable = disable
    def __del__(self):
        if getattr(self, "disable", True):
            return
        self.disable = True
        self.file = self.file or 1
""",
    "a queue of asyncio's": """
import asyncio
class A:
    def __init__(self):
        self.queue = asyncio.Queue()
    def __del__(self):
        self.waiting = self.queue.join
        self.waiting = self.queue.join()
""",
    "a method that was asked before": """
class A:
    running = None
    def is_running(self):
        return self.running is not None
    def close(self):
        if self.is_running():
            raise RuntimeError("it is running")
        self.running = None
    def __del__(self):
        if not self.is_running():
            self.close()
""",
}
