"""The program's output: passed through at once, observed, and copied up to a limit."""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Callable

_CHUNK = 1 << 20
_COPIED = 1 << 20
_LONGEST_LINE = 64 * 1024


class Pump(threading.Thread):
    """Reads one pipe of the program to its end.

    Each pipe has a thread, so that a slow reader of one stream does not hold up the other.

    Args:
        reader: The reading end of the pipe, which the thread closes.
        sink: The file to write the bytes to; None to discard them.
        pattern: What to search in each line, and in an unfinished one such as a prompt.
        watcher: A function to call with each chunk.

    Attributes:
        is_writing: Whether the thread waits for a reader of the sink.
        is_matched: Whether the pattern has matched.
    """

    def __init__(
        self,
        reader: int,
        sink: int | None,
        pattern: re.Pattern[str] | None,
        watcher: Callable[[bytes], None] | None = None,
    ) -> None:
        super().__init__(name="clean-exit output", daemon=True)
        self.is_writing: bool = False
        self.is_matched: bool = False
        self._reader = reader
        self._sink = sink
        self._pattern = pattern
        self._watcher = watcher
        self._copy = bytearray()
        self._rest = b""

    def text(self) -> str:
        """Return the last megabyte of the stream."""
        return self._copy.decode("utf-8", "replace")

    def run(self) -> None:
        """Copy all bytes. If the reader of the sink has gone, the program gets SIGPIPE."""
        try:
            while data := os.read(self._reader, _CHUNK):
                self._copy += data
                del self._copy[:-_COPIED]
                self._search(data)
                if self._watcher is not None:
                    self._watcher(data)
                self.is_writing = True
                self._write(memoryview(data))
                self.is_writing = False
        except BrokenPipeError:
            self.is_writing = False
        finally:
            os.close(self._reader)

    def _search(self, data: bytes) -> None:
        if self._pattern is not None and not self.is_matched:
            lines = (self._rest + data).split(b"\n")
            self._rest = lines[-1][-_LONGEST_LINE:]
            texts = (line.decode("utf-8", "replace") for line in lines)
            self.is_matched = any(map(self._pattern.search, texts))

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
