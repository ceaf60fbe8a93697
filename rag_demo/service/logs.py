"""The log on stderr. A thread writes it, so that requests never wait for a blocked stderr."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import logging
import logging.handlers
import os
import queue
import sys
from typing import Any

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("rag_demo_request_id", default="")
_MAX_LINES = 2048  # in the queue
_FLUSH_S = 1.0  # at exit
_TIME = "%Y-%m-%dT%H:%M:%S%z"
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
_FIELDS = ("request_id", "client", "method", "route", "status", "ms")


def configure_logging(layout: str, level: str) -> None:
    """Write the log to stderr. Call it in programs, not in libraries.

    At most 2,048 lines wait to be written. Further lines are dropped.

    Args:
        layout: "text" or "json".
        level: The lowest level that is logged.
    """
    lines: queue.Queue[Any] = queue.Queue(_MAX_LINES)
    handler = _Handler(lines)
    handler.setFormatter(_JSONFormatter() if layout == "json" else logging.Formatter(_TEXT, _TIME))
    logging.handlers.QueueListener(lines, _Stderr()).start()  # type: ignore[arg-type]
    atexit.register(_flush, lines)
    for name in ("rag_demo", "torch_utils", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]  # Another one would write to stderr, and wait for it.
        logger.setLevel(level)
        logger.propagate = False
    # Clients can cause warnings of uvicorn; DEBUG lines of asyncio do not help. It would write
    # thousands of lines a second when there are no more file descriptors.
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("asyncio").addFilter(_Seldom())
    logging.getLogger("uvicorn.error").setLevel("ERROR")


def _flush(lines: queue.Queue[Any]) -> None:
    """Wait until the lines so far are written, for at most a second."""
    with lines.all_tasks_done:
        lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FLUSH_S)


class _Seldom(logging.Filter):
    """Lets one line a second pass."""

    last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        is_due = record.created - self.last_s >= 1
        if is_due:
            self.last_s = record.created
        return is_due


class _Handler(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> Any:
        record.request_id = getattr(record, "request_id", "") or REQUEST_ID.get()
        return super().prepare(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):  # stderr is blocked.
            self.queue.put_nowait(record)


class _Stderr:
    # Neither a handler nor sys.stderr: the end of the program would wait for their locks while a
    # write is blocked.
    def handle(self, record: logging.LogRecord) -> None:
        line = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError, ValueError):  # The reader is gone, or the disk is full.
            while line:
                line = line[os.write(sys.stderr.fileno(), line) :]


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": self.formatTime(record, _TIME),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: record.__dict__[name] for name in _FIELDS if name in record.__dict__},
        }
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, **error})
