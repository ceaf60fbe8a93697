"""The program of a model's process, which loads the model and answers calls."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from functools import partial
from multiprocessing import spawn
from typing import Any

from torch_utils._memory import BACKENDS, devices_in_use, memory_snapshot
from torch_utils._runtime import loaded_torch
from torch_utils.errors import repr_of
from torch_utils.hosting import wire
from torch_utils.hosting.loaded_model import ThreadModel
from torch_utils.hosting.process import IMPORTING_MAIN, Proxy
from torch_utils.hosting.wire import Message

__all__ = ["serve"]


def serve(connection: int, lifeline: int) -> None:
    """Answer calls until the parent closes the connection.

    Args:
        connection: The descriptor of the socket for the messages.
        lifeline: That of a socket to which nothing is written. It closes with the parent.
    """
    _leave_signals_to_parent()
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    _die_with(lifeline)
    atexit.register(gc.freeze)  # The process's end frees garbage faster.
    with socket.socket(fileno=connection) as own:
        # Forks of this process must not keep the connection open.
        os.register_at_fork(after_in_child=own.close)
        _Server(own).run()


def _leave_signals_to_parent() -> None:
    """Do nothing on signals that are sent to the whole group, because the parent ends this process.

    The handler is Python's, because programs that the model starts would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        former = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=partial(signal.signal, number, former))


def _die_with(lifeline: int) -> None:
    """Make the kernel kill this process when its parent has ended."""
    # A thread would have to wait for the GIL, and PR_SET_PDEATHSIG acts when the thread that
    # started this process ends.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)  # Nothing ever comes.
        os.kill(os.getpid(), signal.SIGKILL)  # The parent has ended already.


class _Server:
    """Load the model and answer the parent's messages, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._main: dict[str, Any] = {}  # describes the parent's main module
        self._loaded: ThreadModel | None = None

    def run(self) -> None:
        """Answer messages until the parent is gone, then close the model."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._answer_one()
        close = getattr(self._loaded and self._loaded.model, "close", None)
        self._loaded = None
        if callable(close):
            close()

    def _answer_one(self) -> None:
        # A function of its own, so that no part of a message outlives it during the next wait.
        message = wire.receive(self._connection)
        wire.send(self._connection, self._answer(message))

    def _answer(self, message: Message) -> Message:
        try:
            value = self._call(*self._load(message))
        except SystemExit:
            raise  # The model wants to end this process.
        except BaseException as error:
            # The caller gets all exceptions of the model.
            return _failure(error)
        try:
            return wire.dump((True, value, _device_bytes()))
        except Exception as error:
            # Classes raise what they like when they cannot be pickled.
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            what = f"the model returned a {kind} that cannot be pickled: {error!r}"
            return _failure(pickle.PicklingError(what))

    def _call(self, kind: str, name: str = "", *rest: Any) -> Any:
        loaded = self._loaded
        if loaded is None:
            sys.argv, self._main, load = rest
            self._loaded = ThreadModel(name, lambda: self._load(Message(load, []))())
            self._loaded.load()
            return gc.collect()
        if kind == "sleep":
            return loaded.sleep(), loaded.asleep_bytes
        if kind == "wake":
            return loaded.wake()
        if kind == "get":
            value = getattr(loaded.model, name)
            return (True, None) if callable(value) else (False, value)
        arguments, keywords = rest
        target = loaded.model if name == "__call__" else getattr(loaded.model, name)
        value = target(*arguments, **keywords)
        return Proxy if value is loaded.model else value  # The class stands for the proxy.

    def _load(self, message: Message) -> Any:
        """Unpickle; import the parent's main module on first use, as multiprocessing does."""
        if self._main and (b"__main__" in message.content or b"__mp_main__" in message.content):
            main, self._main = self._main, {}
            IMPORTING_MAIN.append(True)
            try:
                spawn.prepare(main)
            finally:
                IMPORTING_MAIN.pop()
        return wire.load(message)


def _device_bytes() -> dict[str, int]:
    """Return what torch has reserved on each device that this process uses."""
    torch = loaded_torch()
    if torch is None or not any(devices_in_use(backend, torch) for backend in BACKENDS):
        return {}
    devices = memory_snapshot().devices.items()
    return {name: memory.reserved_bytes for name, memory in devices}


def _failure(error: BaseException) -> Message:
    """Describe an exception by its pickle, if possible, its text and its traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    content = None
    if isinstance(error, Exception):  # Others would end the parent or its task.
        with contextlib.suppress(Exception):  # Pickling a program's class may raise anything.
            content = pickle.dumps(error)
    details = type(error).__module__, content, repr_of(error), text
    return wire.dump((False, details, _device_bytes()))
