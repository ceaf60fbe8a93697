"""ModelProcess: a model in a process of its own, asked through numbered messages."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from os import getpid
from typing import Any

from torch_utils._runtime import early_bound, is_shutting_down
from torch_utils.errors import ModelProcessError
from torch_utils.hosting.child import LAST_WORDS_BYTES
from torch_utils.hosting.frames import Channel, FrameError
from torch_utils.hosting.main_module import find_main, stop_main
from torch_utils.hosting.pickling import dump, dump_call, load_here, raise_error
from torch_utils.hosting.starting import (
    above,
    command,
    describe,
    enlarge,
    journal,
    pair,
    parents_stderr,
    pipe,
)

__all__ = ["ModelProcess", "pickled_load"]

GRACE_S = 5.0
"""How long a process may take to leave when it was asked to, before it is killed."""


def pickled_load(load: Callable[[], Any]) -> bytes:
    """Pickle what loads a model, for another process.

    Raises:
        TypeError: It cannot be found from there: a lambda, something local or interactive.
    """
    try:
        content = pickle.dumps(load, 5)
    except Exception as error:
        # Classes raise what they like when they cannot be pickled.
        raise TypeError(
            f"{load!r} cannot be called in another process ({error}); pass a function or class of "
            'a module, or a functools.partial of one; or use isolation="thread"'
        ) from error
    if any(name in content for name in (b"__main__", b"__mp_main__")) and find_main() is None:
        raise TypeError(
            f"{load!r} was defined in an interactive session, where another process cannot find "
            'it; move it to a module, or use isolation="thread"'
        )
    return content


class ModelProcess:
    """A model in a child process, which ends with this object and with this process.

    Started by the interpreter anew, never forked. One call at a time; further threads wait. What
    makes the answers doubtful (an interrupt in the middle of a call, a message that is not whole
    or not the one that is due) ends the process. So does the end of this one, in any way. A fork
    of this process cannot use it and does not end it.

    Args:
        load: As `pickled_load` returned it.
        name: What errors call the model.
        environment: Variables that differ from this process's.

    Raises:
        ModelProcessError: It cannot be started.
    """

    def __init__(
        self, load: bytes, *, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        stop_main()
        self.name = name
        self.methods: frozenset[str] = frozenset()
        self.added_bytes: dict[str, int] = {}
        self._load = load
        self._pid = os.getpid()
        self._number = 0
        self._owed = 0  # the number of the answer that is due
        self._error: ModelProcessError | None = None
        self._busy = threading.RLock()
        self._ending = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._kept: list[int] = []  # descriptors
        _PROCESSES.add(self)
        try:
            self._start(environment or {})
            settings = {"main": find_main(), "argv": list(sys.argv)}
            self._send(dump(("load", settings, load)))
        except BaseException:
            self.kill()
            raise

    def _start(self, environment: Mapping[str, str]) -> None:
        passed: list[int] = []
        theirs: socket.socket | None = None
        try:
            ours, theirs = pair()
            self._channel = Channel(ours)
            lifeline, mine = pipe()
            passed.append(lifeline)
            self._kept.append(mine)
            said, stderr = pipe()
            passed.append(stderr)
            self._kept.append(said)
            enlarge(said)
            for make in (parents_stderr, journal):
                passed.append(make())
            self._kept.append(above(os.dup(passed[-1])))
            numbers = [theirs.fileno(), lifeline, said, *passed[2:]]
            self._child = subprocess.Popen(
                command(numbers),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=numbers,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise ModelProcessError(
                f"no process can be started for {self.name}: {error}"
            ) from error
        finally:
            if theirs is not None:
                theirs.close()
            for descriptor in passed:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        """The process's id."""
        return 0 if self._child is None else self._child.pid

    def fileno(self) -> int:
        """Return what can be read when an answer has come, or the process has ended."""
        if self._channel is None:
            raise self._again()
        return self._channel.fileno()

    def is_alive(self) -> bool:
        """Say whether it can be called: it runs, and has not been ended."""
        if self._error is not None or self._pid != os.getpid():
            return False
        return self._child is not None and self._child.poll() is None

    def wait_until_loaded(self) -> None:
        """Wait for the model; once, before anything else.

        Raises:
            ModelProcessError: The process has ended.
            Exception: What loading it raised.
        """
        answer = self._exchange(self._receive)
        try:
            found = self._value(answer)
        except BaseException:
            self.end()
            raise
        self.methods = frozenset(found["methods"])
        self.added_bytes = found["added"]

    def call(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the model, and return what it returns.

        Raises:
            ModelProcessError: The process has ended, or its answer cannot be brought here.
            PicklingError: An argument cannot be pickled, which is not sent then.
            Exception: What the method raised.
        """
        return self._ask(dump_call(self.name, name, arguments, keywords))

    def get(self, name: str) -> tuple[bool, Any]:
        """Return whether an attribute of the model can be called, and if not its value."""
        found: tuple[bool, Any] = self._ask(dump(("get", name)))
        return found

    def begin(self, name: str, /, *arguments: Any, **keywords: Any) -> None:
        """Send a call; `finish` waits for what it returns. For one thread, which does both."""
        self._exchange(self._send, dump_call(self.name, name, arguments, keywords))

    def finish(self) -> Any:
        """Return what the call returned that was begun. Raises as `call` does."""
        return self._value(self._exchange(self._receive))

    def _ask(self, message: tuple[Any, list[memoryview]]) -> Any:
        return self._value(self._exchange(self._send_and_receive, message))

    def _exchange(self, talk: Callable[..., Any], *arguments: Any) -> Any:
        """Be the only one who talks to it, and end it if anything but a return ends that.

        No context manager: one that is interrupted in its ``__enter__`` would keep the lock.
        """
        if self._pid != os.getpid():
            raise ModelProcessError(
                f"the process of {self.name} belongs to process {self._pid}, of which this one is "
                "a fork; load the model in this process"
            )
        with self._busy:
            done = False
            try:
                answer = talk(*arguments)
                done = True
            finally:
                if not done:
                    self.kill()
        return answer

    def _send_and_receive(self, message: tuple[Any, list[memoryview]]) -> tuple[Any, list[Any]]:
        self._send(message)
        return self._receive()

    def _send(self, message: tuple[Any, list[memoryview]]) -> None:
        if self._error is not None or self._channel is None:
            raise self._again()
        if self._owed:  # In a signal handler, or in a second thread between begin and finish.
            raise ModelProcessError(f"{self.name} was called in the middle of another call")
        self._number += 1
        self._owed = self._number
        try:
            self._channel.send(self._number, *message)
        except OSError as error:
            raise self._failed(error) from None

    def _receive(self) -> tuple[Any, list[Any]]:
        if self._error is not None or self._channel is None:
            raise self._again()
        try:
            _, content, buffers = self._channel.receive(self._owed)
        except (FrameError, OSError) as error:
            raise self._failed(error) from None
        self._owed = 0
        return content, buffers

    def _value(self, answer: tuple[Any, list[Any]]) -> Any:
        content, buffers = answer
        try:
            succeeded, value = load_here(content, buffers)
        except Exception as error:
            # What unpickling a program's own classes raises, and what this process refuses.
            raise ModelProcessError(
                f"what {self.name} returned cannot be brought here: {error}"
            ) from error
        if not succeeded:
            raise_error(self.name, *value)
        return value

    def _failed(self, error: Exception) -> BaseException:
        """End what is gone, or cannot be trusted any more, and make the error for it."""
        with self._ending:
            if self._error is None:
                has_left = not isinstance(error, FrameError) or error.is_end
                code = self._end(GRACE_S if has_left else 0, ask=False)
                words = self._last_words()
                if has_left and code is not None:
                    why = describe(code)
                else:
                    late = f"it hung up and was still there {GRACE_S:g} s later"
                    why = f"it was killed, because {late if has_left else error}"
                said = f"; its last words: {words}" if words else ""
                self._error = ModelProcessError(
                    f"the process of {self.name} has ended: {why}{said}"
                )
        return self._again()

    def _again(self) -> BaseException:
        if is_shutting_down() and threading.current_thread().daemon:
            return SystemExit(str(self._error))  # It ends the thread without a traceback.
        return ModelProcessError(str(self._error))

    def end(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to leave, kill it if it does not, and wait until it is gone.

        In the middle of a call it is killed at once, and the call raises `ModelProcessError`.
        Idempotent.
        """
        self._stop(grace_s, f"the process of {self.name} was ended")

    @early_bound
    def kill(self) -> None:
        """End the process at once."""
        self._stop(0, f"the process of {self.name} was ended in the middle of a call")

    @early_bound
    def _stop(self, grace_s: float, why: str) -> None:
        if self._pid != os.getpid():
            return
        with self._ending:  # Free, where __del__ calls. clean-exit-lint: ignore[wait]
            if self._error is None:
                self._error = ModelProcessError(why)
                # One that is busy does not hear the question.
                self._end(0 if self._owed else grace_s, ask=True)
                self._last_words()
        # Not while another thread waits for an answer: it is about to learn that there is none.
        if self._busy.acquire(timeout=1):
            try:
                self._let_go()
            finally:
                self._busy.release()

    @early_bound
    def _end(self, grace_s: float, *, ask: bool) -> int | None:
        """Have it end, and return its exit code; None if it was killed here."""
        if self._child is None:
            return 0
        try:
            if ask and self._channel is not None:
                self._channel.hang_up()
            if grace_s:
                self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            code = self._child.poll()
            if code is None:
                self._child.kill()
        self._child.wait()
        return code

    @early_bound
    def _last_words(self) -> str:
        """Pass on what the process said that nobody has read yet, and return the end of it all."""
        if len(self._kept) < 3:
            return ""
        _, said, journal = self._kept
        rest = b""
        with contextlib.suppress(OSError):
            os.set_blocking(said, False)
            while data := os.read(said, 1 << 16):
                rest += data
        with contextlib.suppress(OSError):
            written = 0
            while written < len(rest):
                written += os.write(2, rest[written:])
        words = os.pread(journal, LAST_WORDS_BYTES, 0) + rest
        return words[-LAST_WORDS_BYTES:].decode(errors="replace").strip()

    @early_bound
    def _let_go(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        while self._kept:
            os.close(self._kept.pop())

    def forget(self) -> None:
        """Close a fork's copies of the descriptors: the process is its parent's."""
        self._let_go()
        if self._child is not None:
            self._child.returncode = 0  # Nothing that this process could wait for.

    @early_bound
    def __del__(self) -> None:
        # What others are still at is no garbage, so that nobody has its locks.
        if self.__dict__.get("_pid") == getpid():
            self.kill()


_PROCESSES: weakref.WeakSet[ModelProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for process in list(_PROCESSES):
        process.forget()


os.register_at_fork(after_in_child=_after_fork)
