"""Several worker processes behind one address, and the supervisor that looks after them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import FrameType
from typing import Any

from rag_demo.errors import RagDemoError
from rag_demo.service.server import ALIVE, RELOAD_OTHERS, RELOADED, SERVES
from rag_demo.service.settings import Settings

__all__ = ["run_workers", "worker_command"]

log = logging.getLogger("rag_demo.service")
_PROGRAM = "import sys; sys.path[:] = {}; from rag_demo.service.worker import main; main()"
_LOOK_S = 0.1
_SILENT_S = 15.0  # without a sign of life a worker is killed
_RELOAD_S = 120.0  # for one worker's turn
_CLOSING_S = 70.0  # after the last answer
_SOON_S = 10.0  # A worker that served no longer than this is replaced after a growing wait.
_LONGEST_WAIT_S = 30.0
_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def run_workers(settings: Settings, listener: socket.socket, log_options: tuple[str, str]) -> int:
    """Run ``settings.workers`` processes until a signal.

    SIGTERM and SIGINT stop all workers, which answer what they have accepted. SIGHUP makes them
    reload one after the other. A worker that ends or hangs is replaced, unless none serves and
    the new one cannot start.

    Args:
        settings: The service's.
        listener: The listening socket; closed at the end.
        log_options: Layout and level of the log.

    Returns:
        The number of the signal.

    Raises:
        RagDemoError: A worker could not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        folder = os.environ.get(_MULTIPROC_DIR)
        is_temporary = folder is None
        if folder is None:
            temporary: Any = tempfile.TemporaryDirectory(
                prefix="rag-demo-metrics-", ignore_cleanup_errors=True
            )
            folder = stack.enter_context(temporary)
        told = pickle.dumps((settings, listener.fileno(), log_options, is_temporary))
        return _Supervisor(settings, listener, told, folder).run()


def worker_command() -> list[str]:
    """Return the command of a worker: with this process's path, without the current folder."""
    return [sys.executable, "-c", _PROGRAM.format([entry for entry in sys.path if entry])]


class _Worker:
    """A worker process and the socket to it, through which it gets its settings and reports."""

    def __init__(self, told: bytes, listener: int, environment: dict[str, str]) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                worker_command(),
                stdin=theirs.fileno(),
                env=environment,
                pass_fds=[listener],
                start_new_session=True,  # A terminal's Ctrl-C is for the supervisor.
            )
        self.served_since = self.alive_at = math.inf
        self._unread = b""
        with contextlib.suppress(OSError):  # It has ended already, which is noticed soon.
            self._line.sendall(len(told).to_bytes(8, "little") + told)
        self._line.setblocking(False)

    @property
    def serves(self) -> bool:
        return self.served_since < math.inf and self.process.poll() is None

    def reports(self) -> list[str]:
        """Return the lines since the last call."""
        with contextlib.suppress(OSError):  # Nothing more, or the worker has ended.
            while part := self._line.recv(65536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill_if_silent(self) -> None:
        if time.monotonic() - self.alive_at > _SILENT_S and self.process.poll() is None:
            log.error("worker %d does not answer and is killed", self.process.pid)
            self.process.kill()

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # It has closed its end.
            self._line.shutdown(socket.SHUT_WR)
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # A stopped process would not get the other one.

    def close(self) -> None:
        self._line.close()


class _Supervisor:
    def __init__(
        self, settings: Settings, listener: socket.socket, told: bytes, folder: str
    ) -> None:
        self._settings, self._listener, self._told = settings, listener, told
        self._folder = folder
        self._workers: list[_Worker] = []
        self._signal = 0
        self._turns: list[_Worker] = []  # workers to reload; the first one is reloading
        self._turn_ends = 0.0
        self._reload = False
        self._failure = "the log says why"
        self._early_ends = 0  # in a row
        self._next_start = 0.0

    def run(self) -> int:
        """Look after the workers; return the signal that ended it."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        environment = {**os.environ, _MULTIPROC_DIR: self._folder}
        try:
            while not self._signal:
                is_missing = len(self._workers) < self._settings.workers
                if is_missing and time.monotonic() >= self._next_start:
                    self._start(environment)
                    continue
                time.sleep(_LOOK_S)
                for worker in self._look():
                    if not self._signal:
                        self._replace(worker)
                for worker in self._workers:
                    if not self._signal:
                        worker.kill_if_silent()
                self._give_turns()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._signal

    def _start(self, environment: dict[str, str]) -> None:
        try:
            self._workers.append(_Worker(self._told, self._listener.fileno(), environment))
        except OSError as error:  # Too many processes or open files.
            if not self._workers:
                raise RagDemoError(f"no worker can be started: {error}") from error
            log.error("no worker can be started: %s; another is tried", error)
            self._next_start = time.monotonic() + _LONGEST_WAIT_S

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload = True
            return
        if self._signal:  # The workers are stopping already, and a second signal is for them.
            for worker in self._workers:
                worker.send(number)
        self._signal = number

    def _look(self) -> list[_Worker]:
        """Read the reports and kill silent workers; return those that have ended."""
        ended = [worker for worker in self._workers if worker.process.poll() is not None]
        for worker in self._workers:
            for line in worker.reports():
                self._read(worker, line)
        return ended

    def _read(self, worker: _Worker, line: str) -> None:
        worker.alive_at = time.monotonic()
        if line == SERVES:
            worker.served_since = time.monotonic()
        elif line == RELOADED:
            if self._turn_ends and self._turns[0] is worker:
                self._turns.pop(0)
                self._turn_ends = 0.0
        elif line == RELOAD_OTHERS:
            self._turns += [each for each in self._workers if each is not worker]
        elif line != ALIVE:
            self._failure = line

    def _give_turns(self) -> None:
        """Have the next worker reload once the one before it has."""
        if self._reload:
            self._reload = False
            self._turns += self._workers
        if self._turn_ends and time.monotonic() > self._turn_ends:
            self._turns.pop(0)
            self._turn_ends = 0.0
        if not self._turn_ends and self._turns and self._turns[0].serves:
            self._turn_ends = time.monotonic() + _RELOAD_S
            self._turns[0].send(signal.SIGHUP)

    def _replace(self, worker: _Worker) -> None:
        """Schedule the start of another worker.

        Raises:
            RagDemoError: It never served, and none does: another could not start either.
        """
        self._workers.remove(worker)
        if self._turns[:1] == [worker]:
            self._turn_ends = 0.0
        self._turns = [each for each in self._turns if each is not worker]
        worker.close()
        number, code = worker.process.pid, worker.process.returncode
        if worker.served_since == math.inf:
            if not any(other.serves for other in self._workers):
                raise RagDemoError(f"a worker could not start (exit code {code}): {self._failure}")
            log.error("worker %d could not start: %s; another is tried", number, self._failure)
        else:
            log.error("worker %d ended with %s; another starts", number, code)
        is_early = time.monotonic() - worker.served_since < _SOON_S
        self._early_ends = self._early_ends + 1 if is_early else 0
        wait_s = min(2.0 ** min(self._early_ends, 5), _LONGEST_WAIT_S) if self._early_ends else 0.0
        self._next_start = time.monotonic() + wait_s

    def _stop(self) -> None:
        """Stop the workers, and kill those that have not ended in time."""
        # While this process listens the system accepts connections that nobody would answer.
        self._listener.close()
        for worker in self._workers:
            worker.stop()
        limits = self._settings.limits
        ends = time.monotonic() + self._settings.drain_s + limits.answer_s + _CLOSING_S
        while len(self._look()) < len(self._workers) and time.monotonic() < ends:
            time.sleep(_LOOK_S / 2)
        for worker in self._workers:
            if worker.process.poll() is None:
                log.error("worker %d has not ended in time and is killed", worker.process.pid)
                worker.process.kill()
            worker.process.wait()
            worker.close()
