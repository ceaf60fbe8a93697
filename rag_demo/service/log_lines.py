"""The log on stderr, written by a thread of its own: no request waits for who reads it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from rag_demo.service.guard import REQUEST_ID

__all__ = ["configure_logging"]

log = logging.getLogger("rag_demo.service")
_MOST_LINES = 2048  # that wait to be written; what comes beyond them is counted
_LAST_S = 1.0  # for what waits when the program ends, where nobody reads
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


def configure_logging(layout: str, level: str) -> None:
    """Have the log written on stderr, as text or as JSON; for a program, not for a library.

    Lines that nobody reads are dropped, and counted in the next that is written. At the end of
    the program, and at `logging.Handler.flush`, those that wait are written, for a second at most
    if nobody reads.
    """
    try:
        handler: logging.Handler = _Lines(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # It is no file, or closed.
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if layout == "json" else logging.Formatter(_TEXT))

    def add_request_id(record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True

    handler.addFilter(add_request_id)
    for name in ("rag_demo", "torch_utils", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    # asyncio's at DEBUG are of no use; what uvicorn warns of, any client may have it say.
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("uvicorn.error").setLevel("ERROR")


class _Lines(logging.Handler):
    """Hands lines to a thread, which alone waits until they can be written.

    Not by `sys.stderr`, whose lock that thread would hold when the interpreter ends. It waits in a
    selector, which `torch_utils.release` knows to be at work with no tensor; and nothing here takes
    a lock that a signal handler's line could find taken.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: deque[str | threading.Event] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._dropped = 0
        self._pid = os.getpid()
        threading.Thread(target=self._write_all, name="rag_demo.log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a line among those that wait; where too many do, count it."""
        try:
            line = self.format(record)
        except Exception:  # Wrong arguments of a call of the log: as every handler does.
            self.handleError(record)
            return
        if self._pid != os.getpid():  # A fork, which has no such thread.
            self._write(line)
        elif len(self._waiting) >= _MOST_LINES:
            self._dropped += 1
        else:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                log.warning("%d lines of the log were dropped: nobody read them", dropped)
            self._put(line)

    def flush(self) -> None:
        """Wait until those that wait are written, or nobody has read for a second."""
        if self._pid == os.getpid():
            written = threading.Event()
            self._put(written)
            written.wait(_LAST_S)

    def _put(self, line: str | threading.Event) -> None:
        self._waiting.append(line)
        with contextlib.suppress(BlockingIOError):  # It has been woken often enough.
            os.write(self._wake, b".")

    def _write_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()
                os.read(self._woken, _MOST_LINES)  # First: what comes from here on wakes it again.
                while self._waiting:
                    line = self._waiting.popleft()
                    if isinstance(line, threading.Event):
                        line.set()
                    else:
                        self._write(line)

    def _write(self, line: str) -> None:
        left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # Somebody has made it so for all who have it.
                select.select([], [self._descriptor], [])
            except OSError:  # The reader has gone away, or the disk is full.
                return


class _Json(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        line: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", ""),
        }
        known: Mapping[str, Any] = record.__dict__
        line.update((key, known[key]) for key in ("route", "status", "ms") if key in known)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
