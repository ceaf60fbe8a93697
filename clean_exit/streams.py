"""A program's output on its way: passed through at once, watched, and copied within bounds."""

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
    """The first and the last of what a stream carried."""

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
        """Return it as text; a gap says how much was left out."""
        tail = self._tail[-_HALF_OF_COPY:]
        skipped = self._skipped + len(self._tail) - len(tail)
        gap = f"\n[... {skipped} bytes ...]\n".encode() if skipped else b""
        return bytes(self._head + gap + tail).decode("utf-8", "replace")


class Pump(threading.Thread):
    """Reads one pipe of the program to its end.

    A thread for each: a reader of this process's output that pauses stops nothing else.

    Args:
        reader: The pipe's end here; closed at the end.
        sink: The file that its bytes are written to, untouched; None for nowhere.
        watchers: Called with each chunk.

    Attributes:
        is_writing: Whether it waits for somebody to read the sink.
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
        """Pass everything on. Where nobody reads the sink any more, the program gets SIGPIPE."""
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
            except BlockingIOError:  # Another process that shares it has made it so.
                select.select([], [self._sink], [])
            except BrokenPipeError:
                raise
            except OSError:
                self._sink = None  # A full disk, say; the program still has to be drained.


class Awaited:
    """Waits for a line of one stream that matches.

    A line that is not finished counts when nothing has followed for a moment: a prompt. Until
    then the rest of it may be on its way, and would be lost if the program were stopped.
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
        """Say whether the line has come."""
        if not self._seen and self._rest and time.monotonic() - self._fed_s > _PROMPT_S:
            self._seen = self._matches(self._rest)
        return self._seen

    def _matches(self, line: bytes) -> bool:
        return self._pattern.search(line.decode("utf-8", "replace")) is not None
