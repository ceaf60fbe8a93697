"""The log on stderr. A thread writes it, so that requests never wait for a blocked stderr."""

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

log = logging.getLogger("rag_demo.service")
_MAX_LINES = 2048  # in the queue
_FLUSH_S = 1.0  # at exit
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


def configure_logging(layout: str, level: str) -> None:
    """Write the log to stderr. Call it in programs, not in libraries.

    At most 2,048 lines wait to be written. Further lines are dropped; the next line says how many.

    Args:
        layout: "text" or "json".
        level: The lowest level that is logged.
    """
    records: queue.SimpleQueue[Any] = queue.SimpleQueue()
    handler = _QueueHandler(records)
    handler.setFormatter(_JSONFormatter() if layout == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_add_request_id)
    _StderrListener(records).start()
    atexit.register(_flush, records)
    for name in ("rag_demo", "torch_utils", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    # Clients can cause warnings of uvicorn; DEBUG lines of asyncio do not help.
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("uvicorn.error").setLevel("ERROR")


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "request_id", "") or REQUEST_ID.get()
    return True


def _flush(records: queue.SimpleQueue[Any]) -> None:
    """Wait until the lines so far are written, for at most a second."""
    written = threading.Event()
    records.put(logging.makeLogRecord({"levelno": logging.CRITICAL, "written": written}))
    written.wait(_FLUSH_S)


class _QueueHandler(logging.handlers.QueueHandler):
    # A SimpleQueue is safe in signal handlers but has no limit.
    queue: queue.SimpleQueue[Any]
    _dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() >= _MAX_LINES:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            log.warning("%d lines of the log were dropped: stderr was blocked", dropped)
        self.queue.put(record)


class _StderrListener(logging.handlers.QueueListener):
    # Neither a handler nor sys.stderr: the end of the program would wait for their locks while a
    # write is blocked.
    def handle(self, record: logging.LogRecord) -> None:
        if written := getattr(record, "written", None):
            written.set()
            return
        line = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError, ValueError):  # The reader is gone, or the disk is full.
            while line:
                line = line[os.write(sys.stderr.fileno(), line) :]


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = record.__dict__
        line: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": extra.get("request_id", ""),
            **{key: extra[key] for key in ("route", "status", "ms") if key in extra},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
