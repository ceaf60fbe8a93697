"""The log on stderr, written by a thread of its own, so that no request waits for its reader."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
from typing import Any

from rag_demo.service.guard import REQUEST_ID

__all__ = ["configure_logging"]

log = logging.getLogger("rag_demo.service")
_MAX_LINES = 2048  # that wait to be written
_FLUSH_S = 1.0  # at exit
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


def configure_logging(layout: str, level: str) -> None:
    """Write the log to stderr, as "text" or as "json". For programs, not for libraries.

    Lines beyond 2,048 that nobody reads are dropped; the next line that is written says how many.
    """
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    handler = _BoundedQueueHandler(lines)
    handler.setFormatter(_JSONFormatter() if layout == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_add_request_id)
    logging.handlers.QueueListener(lines, _StderrHandler()).start()
    atexit.register(_flush, lines)
    for name in ("rag_demo", "torch_utils", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    # Clients can cause uvicorn's warnings, and asyncio's DEBUG lines are of no use.
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("uvicorn.error").setLevel("ERROR")


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "request_id", "") or REQUEST_ID.get()
    return True


def _flush(lines: queue.SimpleQueue[Any]) -> None:
    """Wait until the lines so far are written, or for a second if nobody reads them."""
    written = threading.Event()
    lines.put(logging.makeLogRecord({"levelno": logging.CRITICAL, "written": written}))
    written.wait(_FLUSH_S)


class _BoundedQueueHandler(logging.handlers.QueueHandler):
    # A SimpleQueue, which a signal handler may use at any moment, has no bound of its own.
    queue: queue.SimpleQueue[Any]
    _dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() >= _MAX_LINES:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            log.warning("%d lines of the log were dropped: nobody read them", dropped)
        self.queue.put_nowait(record)


class _StderrHandler(logging.Handler):
    # Not by `sys.stderr`: the interpreter would wait at exit for the lock of a blocked write.
    def emit(self, record: logging.LogRecord) -> None:
        written: threading.Event | None = getattr(record, "written", None)
        if written is not None:
            written.set()
            return
        line = memoryview(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it, or the disk is full.
            descriptor = sys.stderr.fileno()
            while line:
                line = line[os.write(descriptor, line) :]


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", ""),
        }
        extra = record.__dict__
        line.update((key, extra[key]) for key in ("route", "status", "ms") if key in extra)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
