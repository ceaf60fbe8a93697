"""A program's output on its way: passed through at once, watched, and copied within bounds."""

from __future__ import annotations

import errno
import os
import re
import select
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
        """Return it as text; what was left out is said in its place."""
        tail = self._tail[-_HALF_OF_COPY:]
        skipped = self._skipped + len(self._tail) - len(tail)
        gap = f"\n[... {skipped} bytes ...]\n".encode() if skipped else b""
        return bytes(self._head + gap + tail).decode("utf-8", "replace")


class Stream:
    """One pipe from the program.

    Args:
        file: The pipe's end here.
        sink: Where its bytes go to, untouched; None for nowhere.
        watchers: Called with each chunk.
    """

    def __init__(
        self, file: int, sink: int | None, watchers: Sequence[Callable[[bytes], None]]
    ) -> None:
        self.file = file
        self._sink = sink
        self._watchers = watchers

    def pump(self) -> bool:
        """Take what is there; False at the end of the stream, or when nobody reads it any more.

        The program is to be told of that as it would be without this: by the pipe.
        """
        try:
            data = os.read(self.file, _CHUNK)
        except OSError as error:
            if error.errno != errno.EIO:  # So a terminal says that nobody has it any more.
                raise
            return False
        for watcher in self._watchers:
            watcher(data)
        return bool(data) and self._pass_on(memoryview(data))

    def _pass_on(self, data: memoryview) -> bool:
        while data and self._sink is not None:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:  # Somebody who shares it has made it so.
                select.select([], [self._sink], [])
            except BrokenPipeError:
                return False
            except OSError:
                self._sink = None  # A full disk, say; the program still has to be drained.
        return True


class Awaited:
    """Waits for a line that matches.

    A line that is not finished counts when nothing has followed for a moment: a prompt. Until
    then the rest of it may be on its way, and would be lost if the program were stopped.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._rest = ""
        self._fed_s = 0.0
        self._seen = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        self._fed_s = time.monotonic()
        self._seen = self._seen or any(self._pattern.search(line) for line in lines)

    def is_seen(self) -> bool:
        """Say whether the line has come."""
        if not self._seen and time.monotonic() - self._fed_s > _PROMPT_S:
            self._seen = bool(self._rest and self._pattern.search(self._rest))
        return self._seen
