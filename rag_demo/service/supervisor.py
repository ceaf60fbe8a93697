"""The supervisor and its workers: several processes that serve one address."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import FrameType

from rag_demo.errors import RagDemoError
from rag_demo.service import server
from rag_demo.service.logs import configure_logging
from rag_demo.service.server import run_server, supervisor_ended
from rag_demo.service.settings import Settings
from torch_utils import exit_on_signals

log = logging.getLogger("rag_demo.service")
_PROGRAM = "import sys; sys.path[:] = {}; import {} as workers; workers.run_worker()"
_POLL_S = 0.1
_SILENT_S = 15.0  # A worker that does not report for so long is killed.
_RELOAD_S = 120.0  # for one worker
_CLOSING_S = 70.0  # after the last answer
_SOON_S = 10.0  # If a worker ends sooner after its start, its replacement waits.
_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def run_workers(settings: Settings, listener: socket.socket, log_options: tuple[str, str]) -> int:
    """Run ``settings.workers`` processes until a signal.

    SIGTERM and SIGINT stop all workers, which answer the accepted requests first. On SIGHUP the
    workers reload one after the other. A worker that ends or hangs is replaced.

    Args:
        settings: The service's settings.
        listener: The listening socket. It is closed at the end.
        log_options: Format and level of the log.

    Returns:
        The number of the signal.

    Raises:
        RagDemoError: A worker cannot start and no other worker serves.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        folder = os.environ.get(_MULTIPROC_DIR)
        is_temporary = folder is None
        if folder is None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="rag-demo-metrics-", ignore_cleanup_errors=True)
            )
        setup = pickle.dumps((settings, listener.fileno(), log_options, is_temporary))
        return _Supervisor(settings, listener, setup, {**os.environ, _MULTIPROC_DIR: folder}).run()


def worker_command() -> list[str]:
    """Return the command of a worker: the same import path without the current folder."""
    path = [entry for entry in sys.path if entry]
    return [sys.executable, "-c", _PROGRAM.format(path, __name__)]


class _Worker:
    """A worker process and the socket for its settings and reports."""

    def __init__(self, setup: bytes, listener: int, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                worker_command(),
                stdin=theirs.fileno(),
                env=environment,
                pass_fds=[listener],
                start_new_session=True,  # A terminal's Ctrl-C is for the supervisor.
            )
        self.served_since = self._alive_at = math.inf
        self.reloads_until = 0.0
        self.failure = "the log says why"
        self._unread = b""
        with contextlib.suppress(OSError):  # The worker has ended already.
            self._socket.sendall(setup)
        self._socket.setblocking(False)

    @property
    def serves(self) -> bool:
        return self.served_since < math.inf and self.process.poll() is None

    def reload(self) -> None:
        self.reloads_until = time.monotonic() + _RELOAD_S
        self.process.send_signal(signal.SIGHUP)

    def read_reports(self) -> bool:
        """Read the reports so far; return whether the other workers must reload."""
        with contextlib.suppress(OSError):  # Nothing to read, or the worker has ended.
            while part := self._socket.recv(65536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        reports = [line.decode(errors="replace") for line in lines]
        for report in reports:
            self._alive_at = time.monotonic()
            if report == server.SERVES:
                self.served_since = self._alive_at
            elif report == server.RELOADED:
                self.reloads_until = 0.0
            elif report not in (server.ALIVE, server.RELOAD_OTHERS):
                self.failure = report
        return server.RELOAD_OTHERS in reports

    def kill_if_silent(self) -> None:
        if time.monotonic() - self._alive_at > _SILENT_S and self.process.poll() is None:
            log.error("worker %d does not answer and is killed", self.process.pid)
            self.process.kill()

    def close(self) -> None:
        """Kill the process if it has not ended."""
        if self.process.poll() is None:
            log.error("worker %d has not ended in time and is killed", self.process.pid)
            self.process.kill()
        self.process.wait()
        self._socket.close()


class _Supervisor:
    def __init__(
        self, settings: Settings, listener: socket.socket, setup: bytes, environment: dict[str, str]
    ) -> None:
        self._settings, self._listener = settings, listener
        self._setup, self._environment = setup, environment
        self._workers: list[_Worker] = []
        self._signal = 0
        self._got_sighup = False
        self._to_reload: list[_Worker] = []
        self._early_ends = 0  # in a row
        self._next_start = 0.0

    def run(self) -> int:
        """Run the workers; return the signal that ended them."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            while not self._signal:
                is_missing = len(self._workers) < self._settings.workers
                if is_missing and time.monotonic() >= self._next_start:
                    self._start()
                    continue
                time.sleep(_POLL_S)
                self._check_workers()
                self._reload_next()
        finally:
            self._stop()
        return self._signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._got_sighup = True
            return
        if self._signal:  # The workers are stopping; a second signal is for them.
            for worker in self._workers:
                worker.process.send_signal(number)
        self._signal = number

    def _start(self) -> None:
        try:
            worker = _Worker(self._setup, self._listener.fileno(), self._environment)
        except OSError as error:  # Too many processes or open files.
            self._delay_start(f"a worker could not start: {error}")
        else:
            self._workers.append(worker)

    def _delay_start(self, reason: str, served_s: float = 0.0) -> None:
        """Log why a worker is missing, and wait longer each time in a row that it ended early.

        Raises:
            RagDemoError: The worker never served and no other worker serves.
        """
        if not served_s and not any(worker.serves for worker in self._workers):
            raise RagDemoError(reason)
        log.error("%s; another starts", reason)
        self._early_ends = self._early_ends + 1 if served_s < _SOON_S else 0
        self._next_start = time.monotonic() + 2.0 ** min(self._early_ends, 5) - 1

    def _check_workers(self) -> None:
        ended = [worker for worker in self._workers if worker.process.poll() is not None]
        for worker in self._workers:
            if worker.read_reports():
                self._to_reload += [each for each in self._workers if each is not worker]
            worker.kill_if_silent()
        for worker in ended:
            if not self._signal:
                self._replace(worker)

    def _reload_next(self) -> None:
        """Let the next worker reload when the one before it has finished."""
        if self._got_sighup:
            self._got_sighup = False
            self._to_reload += self._workers
        self._to_reload = [w for w in dict.fromkeys(self._to_reload) if w in self._workers]
        is_reloading = any(each.reloads_until > time.monotonic() for each in self._workers)
        if self._to_reload and not is_reloading and self._to_reload[0].serves:
            self._to_reload.pop(0).reload()

    def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.close()
        number, code = worker.process.pid, worker.process.returncode
        if worker.served_since < math.inf:
            served_s = time.monotonic() - worker.served_since
            self._delay_start(f"worker {number} ended with exit code {code}", served_s)
        else:
            self._delay_start(f"a worker could not start (exit code {code}): {worker.failure}")

    def _stop(self) -> None:
        """Stop the workers, and kill those that do not end in time."""
        # While this process listens, the system accepts connections without a server.
        self._listener.close()
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
            worker.process.send_signal(signal.SIGCONT)  # A stopped one handles SIGTERM only then.
        limits = self._settings.limits
        ends = time.monotonic() + self._settings.drain_s + limits.answer_s + _CLOSING_S
        while any(each.process.poll() is None for each in self._workers):
            if time.monotonic() > ends:
                break
            for worker in self._workers:
                worker.read_reports()  # A full socket would block the worker.
            time.sleep(_POLL_S / 2)
        for worker in self._workers:
            worker.close()


def run_worker() -> None:
    """Serve as a worker process, until a signal or the end of the supervisor."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Until the server handles it.
    exit_on_signals()
    atexit.register(gc.freeze)  # As in `rag_demo.cli`.
    supervisor = socket.socket(fileno=0)
    try:
        # The supervisor wrote it, to a socket that no other process has.
        settings, descriptor, log_options, is_temporary = pickle.load(supervisor.makefile("rb"))
    except (EOFError, OSError):  # The supervisor has ended.
        sys.exit(1)
    configure_logging(*log_options)

    def report(text: str) -> None:
        with contextlib.suppress(OSError):  # The supervisor has ended.
            supervisor.sendall(text.replace("\n", " ").encode(errors="replace") + b"\n")

    listener = socket.socket(fileno=descriptor)
    try:
        run_server(settings, listener, supervisor=supervisor, report=report)
    except Exception as error:
        # The supervisor raises it, once for all workers.
        if not isinstance(error, (RagDemoError, OSError)):
            log.error("the service could not start", exc_info=error)
        report(str(error) or type(error).__name__)
        sys.exit(1)
    finally:
        # A supervisor that was killed cannot remove its files.
        if is_temporary and supervisor_ended(supervisor):
            shutil.rmtree(os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)
