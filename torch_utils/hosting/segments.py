"""Shared memory through which large buffers travel: copied once, into pages that are warm.

A segment is a memfd whose descriptor goes over the socket, so it has no name and nothing is left
behind. The sender copies into it; the receiver's arrays lie in it. When they are gone the
receiver says so with its next message, and the sender uses the pages again: fresh pages cost
several times as much as the copy. So sizes are rounded up, for the next message is seldom of the
very same size. What is too large to be kept is used once, and goes with the last array in it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["IS_POSSIBLE", "Inbox", "Outbox", "Parcel"]

KEPT_BYTES = 512 << 20
"""How much memory a sender keeps for the next messages, as long as the model is there."""
LENT_AT_ONCE = 16
"""Segments that arrays of the receiver lie in. Each costs descriptors; further ones are copied."""
_ALIGNED = 64
_MAP_FIXED = 0x10

try:
    import ctypes
    import fcntl

    _MMAP = ctypes.CDLL(None).mmap
    _MMAP.restype = ctypes.c_void_p
    _MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
    IS_POSSIBLE = hasattr(os, "memfd_create")
except (ImportError, AttributeError, OSError):
    IS_POSSIBLE = False  # Not Linux: everything goes over the socket.


class Parcel(NamedTuple):
    """What a message says about a segment. No class of its own travels, only these fields.

    Attributes:
        number: Which segment.
        size: Its bytes.
        is_new: Whether its descriptor comes with the message.
        is_kept: Whether it will be used again.
        spans: Where each buffer begins in it, and its bytes.
        forgotten: Other segments, which will not be used again.
    """

    number: int
    size: int
    is_new: bool
    is_kept: bool
    spans: tuple[tuple[int, int], ...]
    forgotten: tuple[int, ...]


class _Segment:
    """Shared memory, in one of the two processes that know it."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def map(self) -> mmap.mmap:
        """Map it, once; all of it at once, for page by page costs more.

        Raises:
            OSError: There is no room for it.
        """
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self.size, _SHARED)
        return self._map

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Copy bytes to where they are to begin.

        Raises:
            OSError: There is no memory for it.
        """
        if self._map is not None:
            whole = memoryview(self._map)
            for start, part in parts:
                copy(part, whole[start : start + part.nbytes])
            return
        for start, part in parts:
            # Into fresh pages the system copies faster: it need not clear and map them first.
            done = 0
            while done < part.nbytes:
                done += os.pwrite(self.descriptor, part[done:], start + done)

    def close(self) -> None:
        """Forget it; arrays that lie in it live on."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        try:
            if self._map is not None:
                self._map.close()
        except BufferError:
            pass  # An array lies in it, and takes it along when it goes.


class Outbox:
    """The segments that one side has made, to send through."""

    def __init__(self) -> None:
        self._kept: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._untold: list[int] = []  # Given up, which the receiver does not know yet.
        self._made = 0

    def put(self, buffers: Sequence[memoryview]) -> tuple[Parcel, _Segment] | None:
        """Copy buffers into a segment.

        Returns:
            What to say about it, and the segment, which `sent` is told of; None if there is no
            memory or no descriptor for one: these buffers have to go another way.
        """
        spans, end = [], 0
        for buffer in buffers:
            spans.append((end, buffer.nbytes))
            end += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
        parts = [(start, buffer) for (start, _), buffer in zip(spans, buffers, strict=True)]
        segment = self._find(end)
        if is_new := segment is None:
            size = rounded(end) if rounded(end) <= KEPT_BYTES else end
            self._untold += self._make_room(size)
            segment = self._make(size, parts)
        else:
            try:
                segment.map()
            except OSError:
                self._free.append(segment)
                return None
            segment.fill(parts)
        if segment is None:
            return None
        forgotten, self._untold = self._untold, []
        is_kept = segment.number in self._kept
        about = (segment.number, segment.size, is_new, is_kept)
        return Parcel(*about, tuple(spans), tuple(forgotten)), segment

    def sent(self, segment: _Segment) -> None:
        """Let go of what was sent, if it is not for another time."""
        if segment.number not in self._kept:
            segment.close()

    def _find(self, size: int) -> _Segment | None:
        # A small array that the receiver keeps must not hold on to a large segment.
        fitting = [one for one in self._free if size <= one.size <= 2 * rounded(size)]
        best = min(fitting, key=lambda one: one.size, default=None)
        if best is not None:
            self._free.remove(best)
        return best

    def _make_room(self, size: int) -> list[int]:
        """Give up segments that are free, but too small, if that makes room; say which."""
        forgotten = []
        room = KEPT_BYTES - size - sum(one.size for one in self._kept.values())
        while 0 > room >= -sum(one.size for one in self._free):
            dropped = self._free.pop(0)
            room += dropped.size
            forgotten.append(dropped.number)
            self._kept.pop(dropped.number).close()
        return forgotten

    def _make(self, size: int, parts: Iterable[tuple[int, memoryview]]) -> _Segment | None:
        try:
            descriptor = os.memfd_create("torch_utils", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None  # No descriptor left.
        try:
            segment = _Segment(self._made + 1, descriptor, size)
            segment.fill(parts)
            # The rest too, now when it can still be refused; later it would be SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                return None  # No memory.
            raise
        self._made += 1
        if size + sum(one.size for one in self._kept.values()) <= KEPT_BYTES:
            self._kept[segment.number] = segment
        return segment

    def take_back(self, unused: Iterable[int], parted: Iterable[int]) -> None:
        """Learn in which segments nothing of the receiver's lies any more, and which it keeps.

        Raises:
            ValueError: It does not have them.
        """
        for number in unused:
            segment = self._kept.get(number)
            if segment is None or segment in self._free:
                raise ValueError(f"segment {number} is returned that was not lent")
            self._free.append(segment)
        for number in parted:
            if number not in self._kept:
                raise ValueError(f"segment {number} is kept that was not lent")
            self._kept.pop(number).close()

    def close(self) -> None:
        """Forget all of them."""
        for segment in self._kept.values():
            segment.close()
        self._kept, self._free = {}, []


class Inbox:
    """The segments that the other side has made, and the arrays that lie in them."""

    def __init__(self) -> None:
        self._known: dict[int, _Segment] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._unused: list[int] = []
        self._parted: list[int] = []
        _INBOXES.add(self)

    def is_empty(self) -> bool:
        """Say whether there is nothing that `returned` would ever say."""
        return not (self._lent or self._unused or self._parted)

    def open(self, parcel: Parcel, descriptor: int | None) -> list[Any]:
        """Return the buffers of a parcel.

        Args:
            parcel: What was said about it.
            descriptor: Of a segment that is new. This method owns it.

        Raises:
            ValueError: The segment is not what was said.
        """
        segment = self._segment(parcel, descriptor)
        for number in parcel.forgotten:
            self._known.pop(number).close()
        if any(a < 0 or n < 0 or a + n > segment.size for a, n in parcel.spans):
            raise ValueError(f"buffers outside of segment {segment.number}")
        # Whatever is made of its slices keeps this object alive, and nothing else does.
        lent = (ctypes.c_char * segment.size).from_buffer(segment.map())
        whole = memoryview(lent).cast("B")
        views: list[Any] = [whole[start : start + size] for start, size in parcel.spans]
        if not parcel.is_kept:
            segment.close()
        elif len(self._lent) < LENT_AT_ONCE:
            self._lent[segment.number] = weakref.ref(lent)
        else:
            self._unused.append(segment.number)
            views = [_own_copy(view) for view in views]
        return views

    def _segment(self, parcel: Parcel, descriptor: int | None) -> _Segment:
        if descriptor is None or not parcel.is_new:
            segment = self._known[parcel.number]
            if segment.size != parcel.size or parcel.number in self._lent:
                raise ValueError(f"segment {parcel.number} is in use, or has another size")
            return segment
        try:
            # One that could shrink would kill whoever reads behind its end.
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if sealed & _SEALS != _SEALS or os.fstat(descriptor).st_size != parcel.size:
                raise ValueError(f"segment {parcel.number} is not sealed, or has another size")
            segment = _Segment(parcel.number, descriptor, parcel.size)
            segment.map()
        except BaseException:
            os.close(descriptor)
            raise
        if parcel.is_kept:
            self._known[parcel.number] = segment
        return segment

    def returned(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Say, once, in which segments nothing lies any more, and which are lost to the sender."""
        for number, lent in list(self._lent.items()):
            if lent() is None and self._lent.pop(number, None) is not None:
                self._unused.append(number)
        unused, self._unused = self._unused, []
        parted, self._parted = self._parted, []
        return tuple(unused), tuple(parted)

    def part(self) -> None:
        """Make what arrays lie in this process's own, page by page as they are written.

        Called before it forks: neither its fork nor the sender may change them from then on, so
        the sender does not get these segments back.
        """
        for number, ref in list(self._lent.items()):
            lent = ref()
            if lent is None:
                continue
            segment = self._known.pop(number)
            del self._lent[number]
            self._parted.append(number)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            address = ctypes.addressof(lent)
            _MMAP(address, segment.size, access, flags, segment.descriptor, 0)
            segment.close()

    def close(self) -> None:
        """Forget all of them; arrays live on."""
        for segment in self._known.values():
            segment.close()
        self._known = {}


_INBOXES: weakref.WeakSet[Inbox] = weakref.WeakSet()


def _before_fork() -> None:
    for inbox in list(_INBOXES):
        inbox.part()


if IS_POSSIBLE:
    os.register_at_fork(before=_before_fork)


def rounded(size: int) -> int:
    """Return the size of the segment for so many bytes: at most a quarter more."""
    step = max(1 << 16, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step


def _own_copy(view: memoryview) -> bytearray:
    mine = bytearray(view.nbytes)
    copy(view, memoryview(mine))
    return mine


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; where numpy is loaded, other threads run meanwhile."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or source.nbytes == 0:
        target[:] = source
    else:
        into = numpy.frombuffer(target, numpy.uint8)
        numpy.copyto(into, numpy.frombuffer(source, numpy.uint8))
