"""Several processes that serve one address, and the one that looks after them.

They are started as programs, with the settings on their standard input, a socket which stays
open as long as the supervisor lives: whatever becomes of it, even by SIGKILL, they end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from rag_demo.errors import RagDemoError
from rag_demo.service.metrics_folder import metrics_folder
from rag_demo.service.running import RELOADED, SERVES
from rag_demo.service.settings import Settings

__all__ = ["main", "run_workers", "worker_command"]

log = logging.getLogger("rag_demo.service")
_PROGRAM = "import sys; sys.path[:] = {}; from rag_demo.service.workers import main; main()"
_LOOK_S = 0.1
_SOON_S = 10.0  # Who has served no longer than this is replaced after a wait, which grows.
_LONGEST_WAIT_S = 30.0
_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def run_workers(settings: Settings, listener: socket.socket, logging_as: tuple[str, str]) -> int:
    """Run ``settings.workers`` processes until a signal says to stop.

    SIGTERM and SIGINT go to all of them, and each answers what it has let in; SIGHUP has all
    reload. One that ends by itself is replaced, as long as one serves or the new one can start.

    Args:
        settings: The service's.
        listener: What is listened on; closed at the end.
        logging_as: Layout and level of the log.

    Returns:
        The number of the signal.

    Raises:
        RagDemoError: A worker could not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        environment = dict(os.environ)
        if _MULTIPROC_DIR not in environment:
            environment[_MULTIPROC_DIR] = stack.enter_context(metrics_folder())
        return _Supervisor(settings, listener, logging_as, environment).run()


def worker_command() -> list[str]:
    """Return what runs a worker: with this process's path, not with the current folder on it."""
    return [sys.executable, "-c", _PROGRAM.format([entry for entry in sys.path if entry])]


class _Worker:
    """One of the processes, and the line to it: the settings go there, and what it says comes.

    It says ``serves``, ``reloaded``, or why it could not start.
    """

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
        self.served_since = math.inf
        self.will_reload = False
        self._said = b""
        with contextlib.suppress(OSError):  # It has ended already, which is seen soon.
            self._line.sendall(len(told).to_bytes(8, "little") + told)
        self._line.setblocking(False)

    @property
    def serves(self) -> bool:
        return self.served_since < math.inf and self.process.poll() is None

    def said(self) -> list[str]:
        """Return what it has said since it was asked last."""
        with contextlib.suppress(OSError):  # Nothing more at the moment, or nobody there.
            while part := self._line.recv(65536):
                self._said += part
        *lines, self._said = self._said.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def reload(self) -> None:
        """Have it reload: as soon as it has its handler for the signal, which would end it."""
        if self.serves:
            self.process.send_signal(signal.SIGHUP)
        else:
            self.will_reload = True

    def end(self) -> None:
        """Have it end as all of them do: the line's end says so, and the signal how."""
        with contextlib.suppress(OSError):  # It has hung up itself.
            self._line.shutdown(socket.SHUT_WR)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)  # One that was stopped would never hear it.

    def close(self) -> None:
        """Hang up: a worker that is still there ends."""
        self._line.close()


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        logging_as: tuple[str, str],
        environment: dict[str, str],
    ) -> None:
        self._told = pickle.dumps((settings, listener.fileno(), logging_as))
        self._listener, self._environment = listener, environment
        self._count = settings.workers
        self._workers: list[_Worker] = []
        self._signal = 0
        self._reload = False
        self._why = "the log says why"
        self._soon_ended = 0  # one after the other
        self._next_start = 0.0

    def run(self) -> int:
        """Look after the workers."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            while not self._signal:
                if len(self._workers) < self._count and time.monotonic() >= self._next_start:
                    self._workers.append(
                        _Worker(self._told, self._listener.fileno(), self._environment)
                    )
                    continue
                time.sleep(_LOOK_S)
                self._look()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload = True
            return
        if self._signal:  # They are stopping, and are told that it is to be quicker.
            self._tell(number)
        self._signal = number

    def _look(self) -> None:
        if self._reload:
            self._reload = False
            for worker in self._workers:
                worker.reload()
        # Those that have ended by now have said all they will say; who serves may say so just now.
        ended = [worker for worker in self._workers if worker.process.poll() is not None]
        for worker in list(self._workers):
            for said in worker.said():
                self._hear(worker, said)
        for worker in ended:
            if not self._signal:
                self._replace(worker)

    def _hear(self, worker: _Worker, said: str) -> None:
        if said == SERVES:
            worker.served_since = time.monotonic()
            if worker.will_reload:
                worker.reload()
        elif said == RELOADED:
            for other in self._workers:
                if other is not worker:
                    other.reload()
        else:
            self._why = said

    def _replace(self, worker: _Worker) -> None:
        """Have another start in place of one that ended; sooner or later.

        Raises:
            RagDemoError: It never served, and none does: another could not start either.
        """
        self._workers.remove(worker)
        self._forget(worker)
        number, code = worker.process.pid, worker.process.returncode
        if worker.served_since == math.inf:
            if not any(other.serves for other in self._workers):
                raise RagDemoError(f"a worker could not start (it ended with {code}): {self._why}")
            log.error("worker %d could not start: %s; another is tried", number, self._why)
        else:
            log.error("worker %d ended with %s; another starts", number, code)
        is_soon = time.monotonic() - worker.served_since < _SOON_S
        self._soon_ended = self._soon_ended + 1 if is_soon else 0
        wait_s = min(2.0**self._soon_ended, _LONGEST_WAIT_S) if self._soon_ended else 0.0
        self._next_start = time.monotonic() + wait_s

    def _tell(self, number: int) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def _stop(self) -> None:
        # As long as this one listens the system lets clients in, whom nobody answers any more.
        self._listener.close()
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.process.wait()
            worker.close()

    def _forget(self, worker: _Worker) -> None:
        from prometheus_client import multiprocess

        worker.close()
        mark: Any = multiprocess.mark_process_dead
        mark(worker.process.pid, self._environment[_MULTIPROC_DIR])


def main() -> None:
    """Be one of the workers."""
    # Until the server has its own handlers: who is told to stop before has nothing to finish.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from rag_demo.service.log_lines import configure_logging
    from rag_demo.service.server import run_server
    from torch_utils import exit_on_signals

    exit_on_signals()
    atexit.register(gc.freeze)  # As the command itself.
    line = socket.socket(fileno=0)
    length = int.from_bytes(_received(line, 8), "little")
    # Written by the supervisor above, through a line that nobody else has.
    settings, descriptor, (layout, level) = pickle.loads(_received(line, length))
    configure_logging(layout, level)

    def tell(said: str) -> None:
        with contextlib.suppress(OSError):  # Nobody is there: this one ends soon, too.
            line.sendall(said.replace("\n", " ").encode(errors="replace") + b"\n")

    try:
        run_server(settings, socket.socket(fileno=descriptor), watched=line, tell=tell)
    except Exception as error:
        # The last place before the interpreter; the supervisor says it, for all of them once.
        if not isinstance(error, (RagDemoError, OSError)):
            log.error("the service could not start", exc_info=error)
        tell(str(error) or type(error).__name__)
        sys.exit(1)


def _received(line: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = line.recv(count - len(found))
        if not part:  # The supervisor has ended before it had told anything.
            sys.exit(1)
        found += part
    return found
