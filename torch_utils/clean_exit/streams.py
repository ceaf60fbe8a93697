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
_LINES_OF_MESSAGE = 2000
# Every message that can be evidence has one of these in its first line. Searched one after the
# other in whole chunks, which is several times as fast as a regular expression, or as lines.
_MARKS = (
    b"xception",  # ignored, in thread, Group, never retrieved
    b"Traceback",
    b"Error in ",
    b"esource",  # the tracker, ResourceWarning
    b"ProcessGroup",
    b"CudaIPC",
    b"Fatal Py",
    b"terminate called",
    b"ssertion",
    b"destroyed",
    b"Segmentation",
    b"Aborted",
)


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


class Sieve:
    """Hands on only what may be evidence, by whole lines: the rest costs next to nothing.

    From a line with a mark on, the lines that a message of several can have go through too.
    """

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._rest = b""
        self._going_through = 0  # lines

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            if len(self._rest) > 2 * _LONGEST_LINE:  # No message of Python's has such lines.
                self._sift(self._rest)
                self._rest = self._rest[-_LONGEST_LINE:]
            return
        lines, self._rest = self._rest + data[:end], data[end:]
        self._sift(lines)

    def _sift(self, lines: bytes) -> None:
        while lines:
            if self._going_through:
                end = _end_of_line(lines, self._going_through)
                part, lines = lines[:end], lines[end:]
                self._take(part)
                marked = any(mark in part for mark in _MARKS)
                self._going_through -= part.count(b"\n")
                if marked:
                    self._going_through = _LINES_OF_MESSAGE
                continue
            found = [at for mark in _MARKS if (at := lines.find(mark)) >= 0]
            if not found:
                return
            lines = lines[lines.rfind(b"\n", 0, min(found)) + 1 :]
            self._going_through = _LINES_OF_MESSAGE

    def close(self) -> None:
        """Hand on what came without an end of line."""
        self._take(self._rest)
        self._rest = b""


def _end_of_line(data: bytes, count: int) -> int:
    """Return where so many lines end, or the data does."""
    end = 0
    if data.count(b"\n") <= count:
        return len(data)
    for _ in range(count):
        end = data.index(b"\n", end) + 1
    return end


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
