"""The other side: what runs in a model's own process."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import Any

from torch_utils.hosting.frames import Channel, FrameError
from torch_utils.hosting.main_module import MainModule
from torch_utils.hosting.pickling import Message, dump, dump_error, load_there
from torch_utils.memory import memory_snapshot
from torch_utils.oom import clear_exception_frames

__all__ = ["serve"]

LAST_WORDS_BYTES = 4000
"""How much of what the process said last its parent can read after its end."""


def serve(connection: int, lifeline: int, said: int, stderr: int, journal: int) -> None:
    """Answer calls until the parent closes the connection; then leave like any program.

    Args:
        connection: A socket, for the messages.
        lifeline: The read end of a pipe into which nobody writes: it ends with the parent.
        said: The read end of the pipe that this process has as its stderr.
        stderr: The parent's stderr.
        journal: A file for the last words.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent.
    for descriptor in (connection, lifeline, said, stderr, journal):
        os.set_inheritable(descriptor, False)
    _die_with(lifeline)
    tee = Tee(said, stderr, journal)
    atexit.register(gc.freeze)  # The end of the process gives back what is garbage by then.
    try:
        with socket.socket(fileno=connection) as own:
            # What the model forks must not keep the connection open when this process has ended.
            os.register_at_fork(after_in_child=own.close)
            Server(Channel(own)).run()
    finally:
        tee.stop()


def _die_with(lifeline: int) -> None:
    """Have this process killed when its parent has ended, whatever it is doing."""
    try:
        import fcntl

        # By the kernel: a thread would have to wait for the GIL, and PR_SET_PDEATHSIG would
        # come when the thread has ended that started this process.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
        if os.read(lifeline, 1) == b"":
            os.kill(os.getpid(), signal.SIGKILL)  # It had ended before.
    except BlockingIOError:
        return
    except (ImportError, AttributeError, OSError):  # Not Linux.
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    os.set_blocking(lifeline, True)
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


class Tee:
    """Passes on what goes to stderr, and keeps the end of it where the parent finds it.

    A thread does it, which a model that crashes takes along: what it has not read by then is read
    by the parent.
    """

    def __init__(self, said: int, stderr: int, journal: int) -> None:
        self._said = said
        self._stderr = stderr
        self._journal = journal
        self._tail = b""
        # Nothing is read without it, so nothing is lost in the hands of a thread that ends.
        self._lock = threading.Lock()
        os.set_blocking(said, False)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        is_open = True
        while is_open:
            select.select([self._said], [], [])
            with self._lock:
                is_open = self._pass_on()

    def _pass_on(self) -> bool:
        try:
            while data := os.read(self._said, 1 << 16):
                self._tail = (self._tail + data)[-LAST_WORDS_BYTES:]
                os.ftruncate(self._journal, 0)
                os.pwrite(self._journal, self._tail, 0)
                self._write(data)
        except BlockingIOError:
            return True
        return False

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._stderr, data) :]
        except OSError:
            return  # The parent's stderr is closed, or full.

    def stop(self) -> None:
        """Pass on the rest; from now on stderr is the parent's."""
        _flush()
        self._lock.acquire()  # For good: the thread ends with the process.
        os.dup2(self._stderr, 2)
        self._pass_on()


class Server:
    """Does what the parent asks for, one message after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._main = MainModule(None)
        self._model: Any = None

    def run(self) -> None:
        """Answer until the parent is gone."""
        while self._answer_one():
            pass
        close = getattr(self._model, "close", None)
        self._model = None
        if callable(close):
            close()

    def _answer_one(self) -> bool:
        # In a function of its own: nothing of a message must live on while the next is awaited.
        try:
            number, content, buffers = self._channel.receive()
        except (FrameError, OSError):
            return False
        answer = self._answer(content, buffers)
        del content, buffers
        _flush()
        try:
            self._channel.send(number, *answer)
        except OSError:
            return False
        return True

    def _answer(self, content: Any, buffers: list[Any]) -> Message:
        try:
            value = self._act(content, buffers)
        except SystemExit:
            raise  # The model wants this process to end, so it does.
        except BaseException as error:
            # Whatever the model raises is its caller's.
            return _failure(error)
        try:
            return dump((True, value))
        except MemoryError as error:
            return _failure(error)
        except Exception as error:
            # Classes raise what they like when they cannot be pickled.
            what = f"a {type(value).__module__}.{type(value).__qualname__} that cannot be pickled"
            return _failure(pickle.PicklingError(f"the model returned {what}: {error!r}"))

    def _act(self, content: Any, buffers: list[Any]) -> Any:
        kind, *rest = load_there(content, buffers, self._main)
        if kind == "load":
            return self._load(*rest)
        name, *rest = rest
        if kind == "get":
            value = getattr(self._model, name)
            return (True, None) if callable(value) else (False, value)
        arguments, keywords = rest
        target = self._model if name == "__call__" else getattr(self._model, name)
        return target(*arguments, **keywords)

    def _load(self, settings: dict[str, Any], load: bytes) -> dict[str, Any]:
        self._main = MainModule(settings["main"])
        sys.argv = settings["argv"]
        self._model = load_there(load, (), self._main)()
        if self._model is None:
            raise TypeError("what loads the model returned None; it has to return the model")
        gc.collect()
        # All of this process: it was started for the model, and goes with it.
        now = memory_snapshot()
        devices = {name: memory.reserved_bytes for name, memory in now.devices.items()}
        return {"added": {"host": now.host.rss_bytes, **devices}, "methods": methods(self._model)}


def methods(model: object) -> list[str]:
    """Name what can be called on a model, without running any of its properties."""
    found = []
    for name in {*dir(type(model)), *getattr(model, "__dict__", ())}:
        static = inspect.getattr_static(model, name, None)
        if not name.startswith("__") and (callable(static) or isinstance(static, classmethod)):
            found.append(name)
    return sorted(found)


def _failure(error: BaseException) -> Message:
    answer = (False, dump_error(error))
    if isinstance(error, MemoryError):
        clear_exception_frames(error)
    return dump(answer)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # Closed by the model, or no longer there.
