"""Several processes that serve one address, and the one that looks after them.

They are started as programs, with the settings on their standard input, which stays open as
long as the supervisor lives: whatever becomes of it, even by SIGKILL, they end.
"""

from __future__ import annotations

import contextlib
import logging
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
from rag_demo.service.settings import Settings

__all__ = ["main", "run_workers"]

log = logging.getLogger("rag_demo.service")
_PROGRAM = "from rag_demo.service.workers import main; main()"
_LOOK_S = 0.1
_SOONEST_S = 10.0  # A worker that ends sooner than this ends the service: it would again.
_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def run_workers(settings: Settings, listener: socket.socket, logging_as: tuple[str, str]) -> int:
    """Run ``settings.workers`` processes until a signal says to stop.

    SIGTERM and SIGINT go to all of them, and each answers what it has let in; SIGHUP has all
    reload. One that ends by itself is started again.

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
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rag-demo-metrics-"))
            environment[_MULTIPROC_DIR] = folder
        return _Supervisor(settings, listener, logging_as, environment).run()


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
        self._workers: list[tuple[subprocess.Popen[bytes], float]] = []
        self._signal = 0
        self._reload = False

    def run(self) -> int:
        """Look after the workers."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            for _ in range(self._count):
                self._workers.append(self._start())
            while not self._signal:
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
        else:
            self._signal = number

    def _start(self) -> tuple[subprocess.Popen[bytes], float]:
        worker = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            env=self._environment,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # A terminal's Ctrl-C is for the supervisor, which tells them.
        )
        assert worker.stdin is not None
        worker.stdin.write(len(self._told).to_bytes(8, "little") + self._told)
        worker.stdin.flush()
        return worker, time.monotonic()

    def _look(self) -> None:
        if self._reload:
            self._reload = False
            self._tell(signal.SIGHUP)
        for place, (worker, started) in enumerate(self._workers):
            if worker.poll() is None or self._signal:
                continue
            if time.monotonic() - started < _SOONEST_S:
                raise RagDemoError("a worker could not start; the log says why")
            log.error("worker %d ended with %s; another starts", worker.pid, worker.returncode)
            self._forget(worker)
            self._workers[place] = self._start()

    def _tell(self, number: int) -> None:
        for worker, _ in self._workers:
            if worker.poll() is None:
                worker.send_signal(number)

    def _stop(self) -> None:
        # As long as this one listens the system lets clients in, whom nobody answers any more.
        self._listener.close()
        self._tell(signal.SIGTERM)
        for worker, _ in self._workers:
            worker.wait()
            assert worker.stdin is not None
            worker.stdin.close()

    def _forget(self, worker: subprocess.Popen[bytes]) -> None:
        from prometheus_client import multiprocess

        assert worker.stdin is not None
        worker.stdin.close()
        folder = self._environment[_MULTIPROC_DIR]
        mark: Any = multiprocess.mark_process_dead
        mark(worker.pid, folder)


def main() -> None:
    """Be one of the workers."""
    # Until the server has its own handlers: who is told to stop before has nothing to finish.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from rag_demo.service.server import configure_logging, run_server
    from torch_utils import exit_on_signals, fast_exit

    exit_on_signals()
    fast_exit()  # As the command itself.
    length = int.from_bytes(os.read(0, 8), "little")
    told = b""
    while len(told) < length:
        told += os.read(0, length - len(told))
    # Written by the supervisor above, through a pipe that nobody else has.
    settings, descriptor, (layout, level) = pickle.loads(told)
    configure_logging(layout, level)
    try:
        run_server(settings, socket.socket(fileno=descriptor), watched=0)
    except RagDemoError as error:
        log.error("%s", error)
        sys.exit(1)
