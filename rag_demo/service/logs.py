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
import threading
from typing import Any

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("rag_demo_request_id", default="")
_MAX_LINES = 2048  # in the queue
_FLUSH_S = 1.0  # at exit
_TIME = "%Y-%m-%dT%H:%M:%S%z"
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
_FIELDS = ("request_id", "client", "method", "route", "status", "ms")


def configure_logging(layout: str, level: str) -> None:
    """Write the log to stderr. Call it in programs, not in libraries.

    At most 2,048 lines wait to be written. Further lines are dropped; the next line says how many.

    Args:
        layout: "text" or "json".
        level: The lowest level that is logged.
    """
    lines: queue.Queue[Any] = queue.Queue(_MAX_LINES)
    handler = _Handler(lines)
    handler.setFormatter(_JSONFormatter() if layout == "json" else logging.Formatter(_TEXT, _TIME))
    handler.addFilter(_add_request_id)
    logging.handlers.QueueListener(lines, _Stderr()).start()  # type: ignore[arg-type]
    atexit.register(_flush, lines)
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


def _flush(lines: queue.Queue[Any]) -> None:
    """Wait until the lines so far are written, for at most a second."""
    written = threading.Event()
    with contextlib.suppress(queue.Full):
        lines.put(logging.makeLogRecord({"written": written}), timeout=_FLUSH_S)
        written.wait(_FLUSH_S)


class _Handler(logging.handlers.QueueHandler):
    _dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        dropped, self._dropped = self._dropped, 0
        try:
            if dropped:
                line = f"{dropped} lines of the log were dropped: stderr was blocked"
                self.queue.put_nowait(logging.makeLogRecord({"msg": line}))
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped = dropped + 1


class _Stderr:
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
            "at": self.formatTime(record, _TIME),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{key: extra[key] for key in _FIELDS if key in extra},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
