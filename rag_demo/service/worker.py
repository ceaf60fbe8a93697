"""One worker: a process that serves, started by the supervisor.

It ends when the socket to the supervisor does, which is so however the supervisor ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import pickle
import shutil
import signal
import socket
import sys

from rag_demo.errors import RagDemoError

__all__ = ["main"]

log = logging.getLogger("rag_demo.service")


def main() -> None:
    """Serve as a worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Until the server handles it.
    from rag_demo.service.logs import configure_logging
    from rag_demo.service.server import run_server
    from torch_utils import exit_on_signals

    exit_on_signals()
    atexit.register(gc.freeze)  # As in `rag_demo.cli`.
    line = socket.socket(fileno=0)
    length = int.from_bytes(_receive(line, 8), "little")
    # Written by the supervisor, over a socket that no other process has.
    settings, descriptor, log_options, is_temporary = pickle.loads(_receive(line, length))
    configure_logging(*log_options)

    def report(text: str) -> None:
        with contextlib.suppress(OSError):  # The supervisor has ended.
            line.sendall(text.replace("\n", " ").encode(errors="replace") + b"\n")

    try:
        run_server(settings, socket.socket(fileno=descriptor), supervisor=line, report=report)
    except Exception as error:
        # The supervisor raises it, once for all workers.
        if not isinstance(error, (RagDemoError, OSError)):
            log.error("the service could not start", exc_info=error)
        report(str(error) or type(error).__name__)
        sys.exit(1)
    finally:
        if is_temporary and _has_ended(line):  # A supervisor that was killed removes nothing.
            shutil.rmtree(os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)


def _has_ended(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _receive(line: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = line.recv(count - len(received))
        if not part:
            sys.exit(1)
        received += part
    return received
