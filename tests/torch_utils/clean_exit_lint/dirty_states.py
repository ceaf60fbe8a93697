"""Dirty files: half-built objects, waiting, devices, logging and raising."""

from __future__ import annotations

DIRTY_STATES = {
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
}
