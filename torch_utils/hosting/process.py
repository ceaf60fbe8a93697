"""ModelProcess: a model in a process of its own, called through a socket.

The process isolates the memory and the crashes of a model. It runs with the caller's rights and
does not protect against a hostile model.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import spawn
from os import getpid
from pathlib import Path
from typing import Any

from torch_utils._registry import REGISTRY
from torch_utils._release.storages import Storages
from torch_utils._report import CleanupReport
from torch_utils._resource import add_note, closed_error
from torch_utils._runtime import early_bound, is_shutting_down
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelProcessError, repr_of
from torch_utils.hosting import wire
from torch_utils.hosting.footprint import ASLEEP, Footprint, by_device, footprint_of
from torch_utils.hosting.wire import Message

__all__ = ["ModelProcess", "Proxy", "pickled_load"]

GRACE_S = 5.0
"""How long a process may take to end before it is killed, in seconds."""
_BUFFER_BYTES = 1 << 20
_START = "import sys; sys.path[:] = {}; from torch_utils.hosting.child import serve; serve({}, {})"
_MAIN = ("init_main_from_name", "init_main_from_path")
IMPORTING_MAIN: list[bool] = []
"""Not empty while a model's process imports its parent's main module."""


def pickled_load(load: Callable[[], Any]) -> bytes:
    """Pickle a load function for another process.

    Raises:
        TypeError: The other process cannot import it: it is a lambda, a local function, or a
            function of an interactive session.
    """
    try:
        content = pickle.dumps(load, 5)
    except Exception as error:
        # Classes that cannot be pickled may raise anything.
        raise TypeError(
            f"{load!r} cannot be called in another process ({error}); pass a function or class of "
            'a module, or a functools.partial of one, or use isolation="thread"'
        ) from error
    if b"__main__" in content and not _main_module():
        raise TypeError(
            f"{load!r} was defined in an interactive session or a -c command, which another "
            'process cannot import; move it to a module, or use isolation="thread"'
        )
    return content


def _main_module() -> dict[str, Any]:
    """Describe the main module for a spawned process, as multiprocessing does."""
    data = spawn.get_preparation_data("model")
    path = data.get(_MAIN[1])
    if path is not None and not Path(path).exists():  # "<stdin>"
        return {}
    return {key: data[key] for key in _MAIN if key in data}


def _describe(code: int | None) -> str:
    """Describe the end of a process by its exit code; None if it had to be killed."""
    if code is None:
        return f"killed {GRACE_S:g} s after it closed its connection"
    if code >= 0:
        return f"exit code {code}"
    name = {one.value: one.name for one in signal.Signals}.get(-code, "unknown")
    hint = ", which the system sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"signal {-code} ({name}){hint}"


class ModelProcess:
    """A model in a child process.

    `load` spawns the process, which is never forked. It ends with this object, and with this
    process even if that crashes. It runs one call at a time; other threads wait. A call that does
    not return because of an interrupt or a timeout ends the process: its answer could be mistaken
    for that of the next call. A forked child of this process can neither call nor end it.

    Args:
        load: The result of `pickled_load`.
        name: The model's name in errors.
        environment: Environment variables to add or change.
        call_timeout_s: Seconds that a call may take; None for no limit.

    Attributes:
        report: What was freed, after `close`.
    """

    def __init__(
        self,
        load: bytes,
        name: str,
        environment: Mapping[str, str] | None,
        call_timeout_s: float | None,
    ) -> None:
        self.name = name
        self.report: CleanupReport = CleanupReport()
        self.storages: Storages = Storages()  # Callers keep nothing of it.
        self._error = ""  # why it has ended
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline: socket.socket | None = None
        self._pid = getpid()
        self._device_bytes: dict[str, int] = {}  # that it had reserved at its last answer
        self.asleep_bytes: int = 0  # of its host memory, which belong on a device
        self._load = load
        self._call_timeout_s = call_timeout_s
        self._busy = threading.RLock()
        self._is_busy = False
        self._environment = dict(environment or {})

    def load(self) -> None:
        """Start the process and load the model. Call it once, before any other method.

        Raises:
            ModelProcessError: The process cannot be started, or has ended.
            Exception: The load raised it. The process runs until `close`.
        """
        if IMPORTING_MAIN:
            raise ModelProcessError(
                f"importing the main module starts a process for {self.name}; guard that code with "
                '`if __name__ == "__main__":`'
            )
        _PROCESSES.add(self)
        # Options such as -W and -X; multiprocessing uses this private function as well.
        options: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        path = list(map(str, sys.path))
        try:
            # An interrupt must not leave a process that is not known here.
            with DeferredSignals(), contextlib.ExitStack() as its_ends:
                self._connection, end = socket.socketpair()
                its_ends.enter_context(end)
                self._lifeline, lifeline = socket.socketpair()
                its_ends.enter_context(lifeline)
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                descriptors = end.fileno(), lifeline.fileno()
                self._child = subprocess.Popen(
                    [sys.executable, *options, "-u", "-c", _START.format(path, *descriptors)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    env={**os.environ, **self._environment},
                )
        except OSError as error:
            raise ModelProcessError(f"cannot start a process for {self.name}: {error}") from error
        self.ask("start", self.name, list(sys.argv), _main_module(), self._load)

    @property
    def pid(self) -> int:
        """The id of the process; 0 if it was not started."""
        return 0 if self._child is None else self._child.pid

    def is_alive(self) -> bool:
        """Return whether the process runs and can be called."""
        if self._error or self._pid != getpid():
            return False
        return self._child is not None and self._child.poll() is None

    def resident_bytes(self, *, mapped_files: bool = True) -> int:
        """Return its resident memory in bytes; 0 if it is unknown.

        Args:
            mapped_files: Whether to count mapped files, such as libraries and mapped weights.
        """
        try:
            words = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        except OSError:
            return 0
        return (int(words[1]) - (0 if mapped_files else int(words[2]))) * os.sysconf("SC_PAGE_SIZE")

    def measure(self) -> None:
        """Do nothing: each answer of the process has its memory."""

    def footprint(self) -> Footprint:
        """Return its memory: on the host now, on devices at its last answer."""
        host = max(0, self.resident_bytes() - self.asleep_bytes)
        sizes = {**self._device_bytes, "host": host, ASLEEP: self.asleep_bytes}
        return footprint_of(self, {device: nbytes for device, nbytes in sizes.items() if nbytes})

    def sizes(self) -> dict[str, int]:
        """Return its bytes on the host now, and on each device at its last answer."""
        return by_device(self.footprint())

    @property
    def is_asleep(self) -> bool:
        """Whether the values of its model are in host memory."""
        return self.asleep_bytes > 0

    def sleep(self) -> str:
        """Move its model to host memory; return why that is impossible, or an empty string."""
        reason, self.asleep_bytes = self.ask("sleep")
        return str(reason)

    def wake(self) -> None:
        """Move its model back to its devices. If that raises, it is still asleep as a whole."""
        self.ask("wake")
        self.asleep_bytes = 0

    def close(self) -> None:
        """Ask the process to end, kill it after `GRACE_S` seconds, and report its memory as freed.

        During a call it is killed immediately, and the call raises `ModelProcessError`. Idempotent.
        """
        freed = {**self._device_bytes, "host": self.resident_bytes(mapped_files=False)}
        grace_s = 0 if self._is_busy else GRACE_S
        if is_shutting_down():  # All waits of the exit have one deadline.
            grace_s = min(grace_s, REGISTRY.exit_left_s())
        self._stop(grace_s, "was ended")
        self.report = CleanupReport(freed_bytes=freed)

    def ask(self, *request: Any, check: Any = None, wait_s: float | None = None) -> Any:
        """Send a request when no other one is being answered, and return the answer's value.

        The process is killed if an interrupt or the limit of a call ends the wait for the answer.

        Args:
            *request: "call", a name, arguments and keywords; "get" and a name; "start" and what
                `load` sends; "sleep" or "wake".
            check: Called when no other request runs; raises if this one is no longer wanted.
            wait_s: How long to wait for the calls of other threads; None for no limit.

        Raises:
            TimeoutError: Another thread's call still runs after ``wait_s``.
            Exception: The model raised it.
        """
        try:
            message = wire.dump(request)
        except Exception as error:
            # Classes that cannot be pickled may raise anything.
            raise pickle.PicklingError(
                f"{self.name}.{request[1]}() runs in another process, and an argument cannot be "
                f"sent there ({repr_of(error)}); pass plain objects, arrays, and functions and "
                'classes of a module, or use isolation="thread"'
            ) from error
        if self._pid != getpid():
            raise ModelProcessError(
                f"the process of {self.name} belongs to process {self._pid}, and this process is "
                "a fork of that; load the model in this process"
            )
        with self._busy if wait_s is None else self._busy_within(wait_s):
            if self._is_busy:  # By a signal handler, or after an interrupt.
                self.kill()
                raise ModelProcessError(
                    f"{self.name} was called during another call of the same thread, so its "
                    "process was killed; do not call it in signal handlers"
                )
            if check is not None:
                check()
            if self._error or self._connection is None:
                raise self._closed_error()
            try:
                self._is_busy = True
                limit_s = self._call_timeout_s if request[0] in ("call", "get") else None
                self._connection.settimeout(limit_s)
                wire.send(self._connection, message)
                answer = wire.receive(self._connection)
            except (TimeoutError, BlockingIOError):
                self._stop(0, f"has ended: killed, because a call took longer than {limit_s:g} s")
                raise self._closed_error() from None
            except (EOFError, OSError):
                self._stop(GRACE_S)
                raise self._closed_error() from None
            except BaseException:  # A late answer would be taken for that of the next call.
                self.kill()
                raise
            finally:
                self._is_busy = False
        return self._value(answer)

    @contextlib.contextmanager
    def _busy_within(self, wait_s: float) -> Iterator[None]:
        if not self._busy.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
            raise TimeoutError(
                f"the process of {self.name} is still busy with another call after {wait_s:g} s; "
                "pass a larger timeout_s to the lease"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _value(self, answer: Message) -> Any:
        """Return the value of an answer, or raise the exception of the model."""
        try:
            succeeded, value, self._device_bytes = wire.load(answer)
        except Exception as error:
            # Unpickling a program's classes may raise anything.
            raise ModelProcessError(
                f"the result of {self.name} cannot be unpickled here: {error}"
            ) from error
        if succeeded:
            return value
        module, content, text, traceback = value
        raised: BaseException = ModelProcessError(f"the process of {self.name} raised {text}")
        # An error must not import a large library, such as torch, into this process.
        if content is not None and (module in sys.modules or module in sys.stdlib_module_names):
            with contextlib.suppress(Exception):  # As above.
                raised = pickle.loads(content)
        add_note(raised, f"in the process of {self.name}:\n{traceback.rstrip()}")
        raise raised

    def _closed_error(self) -> BaseException:
        return closed_error(f"the process of {self.name} {self._error}", ModelProcessError)

    @early_bound
    def kill(self) -> None:
        """Kill the process."""
        self._stop(0, "was ended in the middle of a call")

    @early_bound
    def _stop(self, grace_s: float, why: str = "") -> None:
        """End the process; its exit code is the reason if ``why`` is empty.

        In a forked child: leave the process alone, and close the copies of its descriptors.
        """
        self._error = self._error or why
        child, code = self._child, None
        if child is not None and self._pid != getpid():
            child.returncode = 0  # Not a child of this process.
        elif child is not None:
            try:
                if grace_s and self._connection is not None:
                    with contextlib.suppress(OSError):
                        self._connection.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = child.wait(grace_s)
            finally:
                child.kill()  # Does nothing if it has ended.
                child.wait()
        self._error = self._error or f"has ended: {_describe(code)}"
        for one in (self._connection, self._lifeline):
            if one is not None:
                one.close()

    @early_bound
    def __del__(self) -> None:
        self.kill()  # No thread holds its locks, because it is garbage.


class _Method(partial[Any]):
    """A method of a model in another process."""

    def __getattr__(self, name: str) -> Any:
        what = f"{self.args[0]}.{name} is in another process"
        raise AttributeError(f"{what}; use it in a method of the model, and call that")


class Proxy:
    """A proxy of a model in another process, for the time of a lease.

    Methods and the model itself can be called and attributes can be read; arguments and results are
    pickled, so an attribute is a copy. A method that returns the model returns the proxy.
    Attributes cannot be set, and methods of parts (``model.tokenizer.decode()``) cannot be called.

    Args:
        ask: Sends ``("call", name, arguments, keywords)`` or ``("get", name)``.
        what: Its description in errors.
    """

    __slots__ = ("_ask", "_methods", "_what")

    def __init__(self, ask: Callable[..., Any], what: str) -> None:
        self._ask = ask
        self._methods: set[str] = set()  # names of known methods
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(
                f"{self._what} does not forward {name}; call a method of the model"
            )
        if name not in self._methods:
            can_be_called, value = self._ask("get", name)
            if not can_be_called:
                return value
            self._methods.add(name)
        return _Method(self._call, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model itself."""
        return self._call("__call__", *arguments, **keywords)

    def _call(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        value = self._ask("call", name, arguments, keywords)
        return self if value is Proxy else value

    def __repr__(self) -> str:
        return f"<{self._what}>"


_PROCESSES: weakref.WeakSet[ModelProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for process in list(_PROCESSES):
        process.kill()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
