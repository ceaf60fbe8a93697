"""The program's output: passed through at once, observed, and copied up to a limit."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence

_CHUNK = 1 << 20
_HALF_OF_COPY = 1_000_000
_LONGEST_LINE = 64 * 1024
_PROMPT_S = 0.2


class Copy:
    """The beginning and the end of a stream."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._skipped = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        room = _HALF_OF_COPY - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * _HALF_OF_COPY:
            self._skipped += len(self._tail) - _HALF_OF_COPY
            del self._tail[:-_HALF_OF_COPY]

    def text(self) -> str:
        """Return the copy as text; a line in the gap has the number of missing bytes."""
        tail = self._tail[-_HALF_OF_COPY:]
        skipped = self._skipped + len(self._tail) - len(tail)
        gap = f"\n[... {skipped} bytes ...]\n".encode() if skipped else b""
        return bytes(self._head + gap + tail).decode("utf-8", "replace")


class Pump(threading.Thread):
    """Reads one pipe of the program to its end.

    Each pipe has a thread, so that a slow reader of one stream does not hold up the other.

    Args:
        reader: The reading end of the pipe, which the thread closes.
        sink: The file to write the bytes to; None to discard them.
        watchers: Functions to call with each chunk.

    Attributes:
        is_writing: Whether the thread waits for a reader of the sink.
    """

    def __init__(
        self, reader: int, sink: int | None, watchers: Sequence[Callable[[bytes], None]]
    ) -> None:
        super().__init__(name="clean-exit output", daemon=True)
        self.is_writing: bool = False
        self._reader = reader
        self._sink = sink
        self._watchers = watchers

    def run(self) -> None:
        """Copy all bytes. If the reader of the sink has gone, the program gets SIGPIPE."""
        try:
            while data := os.read(self._reader, _CHUNK):
                for watcher in self._watchers:
                    watcher(data)
                self.is_writing = True
                self._write(memoryview(data))
                self.is_writing = False
        except BrokenPipeError:
            self.is_writing = False
        finally:
            os.close(self._reader)

    def _write(self, data: memoryview) -> None:
        while data and self._sink is not None:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:  # Another process with this file made it non-blocking.
                select.select([], [self._sink], [])
            except BrokenPipeError:
                raise
            except OSError:
                self._sink = None  # Such as a full disk; the pipe must still be emptied.


class LineWaiter:
    """Searches one stream for a line that matches.

    An unfinished line, such as a prompt, counts if no more bytes follow for a moment. Before that
    its rest may be on the way, and would be lost if the program were stopped.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._rest = b""
        self._fed_s = 0.0
        self._seen = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        self._fed_s = time.monotonic()
        self._seen = self._seen or any(map(self._matches, lines))

    def is_seen(self) -> bool:
        """Whether the line has come."""
        if not self._seen and self._rest and time.monotonic() - self._fed_s > _PROMPT_S:
            self._seen = self._matches(self._rest)
        return self._seen

    def _matches(self, line: bytes) -> bool:
        return self._pattern.search(line.decode("utf-8", "replace")) is not None
