"""Numbered, checked, whole messages between two processes, over one socket.

A message is a head of fixed size, what it says about shared memory, its content, and what is too
small for shared memory. Whatever is not as it must be raises `FrameError`: the one at the other
end is not to be trusted any more.
"""

from __future__ import annotations

import array
import marshal
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from torch_utils._runtime import early_bound
from torch_utils.hosting.segments import IS_POSSIBLE, Inbox, Outbox, Parcel

__all__ = ["Channel", "FrameError"]

_HEAD = struct.Struct("<4sIQQQ")  # magic, bytes about memory, number, bytes of content, of buffers
_MAGIC = b"TUh1"
_SHARED_FROM = 256 << 10
_AT_ONCE = 16 << 10
_NOTHING = (((), ()), None, ())  # what a message says that is only its content
_ROOM_FOR_DESCRIPTORS = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class FrameError(Exception):
    """What came was no whole message of the right number, or nothing came any more.

    Attributes:
        is_end: Whether the other end was closed.
    """

    def __init__(self, message: str, *, is_end: bool = False) -> None:
        super().__init__(message)
        self.is_end = is_end


class Channel:
    """One end. One thread sends and receives at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._out = Outbox()
        self._in = Inbox()
        self._early = memoryview(b"")  # read together with the head of a message

    def fileno(self) -> int:
        """Return the socket's descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, number: int, content: Any, buffers: list[memoryview] | None = None) -> None:
        """Send one message.

        Args:
            number: Its number.
            content: What it says.
            buffers: What is sent beside it. Is emptied when it has been copied: what lies in it
                may have come from the other end, which then learns at once that it is unused.

        Raises:
            OSError: The other end is gone.
        """
        if not buffers and len(content) < _AT_ONCE and self._in.is_empty():
            head = _HEAD.pack(_MAGIC, 0, number, len(content), 0)
            self._socket.sendall(head + content)
            return
        parts = [memoryview(part).cast("B") for part in (content, *(buffers or ()))]
        shared = None
        if IS_POSSIBLE and sum(part.nbytes for part in parts) >= _SHARED_FROM:
            shared = self._out.put(parts)
        parcel, segment = shared or (None, None)
        if parcel is not None:
            parts = []
            if buffers:
                buffers.clear()
        sizes = tuple(part.nbytes for part in parts)
        said: Any = (self._in.returned(), None if parcel is None else tuple(parcel), sizes[1:])
        about = marshal.dumps(said) if said != _NOTHING else b""
        head = _HEAD.pack(_MAGIC, len(about), number, sum(sizes[:1]), sum(sizes[1:]))
        is_new = segment is not None and parcel is not None and parcel.is_new
        descriptor = segment.descriptor if segment is not None and is_new else None
        try:
            self._send_all([memoryview(head), memoryview(about), *parts], descriptor)
        finally:
            if segment is not None:
                self._out.sent(segment)

    def _send_all(self, parts: list[memoryview], descriptor: int | None) -> None:
        extra = []
        if descriptor is not None:
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        left = [part for part in parts if part.nbytes]
        while left:
            sent = self._socket.sendmsg(left[:64], extra)
            extra = []
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def receive(self, number: int | None = None) -> tuple[int, Any, list[Any]]:
        """Wait for one message.

        Args:
            number: What it must have, if that is known.

        Returns:
            Its number, its content and its buffers.

        Raises:
            FrameError: It is not whole, or not the right one.
            OSError: The connection failed.
        """
        # Mostly all of it in one go: no other message comes before this one is answered.
        data, ancillary, _, _ = self._socket.recvmsg(
            _AT_ONCE, _ROOM_FOR_DESCRIPTORS, _CLOSE_ON_EXEC
        )
        descriptors = _descriptors(ancillary) if ancillary else []
        try:
            if not data:
                raise FrameError("the connection was closed", is_end=True)
            self._early = memoryview(data)
            head = self._read(_HEAD.size)
            magic, about_size, its_number, content_size, rest = _HEAD.unpack(head)
            if magic != _MAGIC:
                raise FrameError(f"a message begins with {magic!r}")
            if number is not None and its_number != number:
                raise FrameError(f"message {its_number} came, not {number}")
            content, buffers = self._contents(about_size, content_size, rest, descriptors)
            if self._early:
                raise FrameError(f"{len(self._early)} bytes too many")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return its_number, content, buffers

    def _contents(
        self, about_size: int, content_size: int, rest: int, descriptors: list[int]
    ) -> tuple[Any, list[Any]]:
        sizes: tuple[int, ...] = ()
        parcel = None
        if about_size:
            try:
                returned, fields, sizes = marshal.loads(self._read(about_size))
                self._out.take_back(*returned)
                parcel = None if fields is None else Parcel(*fields)
                if sum(sizes) != rest:
                    raise ValueError(f"{sum(sizes)} bytes of buffers, not {rest}")
            except (ValueError, TypeError, EOFError) as error:
                raise FrameError(f"a message says what cannot be: {error}") from error
        if parcel is None:
            return self._read(content_size), [self._own(size) for size in sizes]
        descriptor = descriptors.pop() if descriptors and parcel.is_new else None
        try:
            content, *buffers = self._in.open(parcel, descriptor)
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError(f"memory that is not what was said: {error}") from error
        except OSError as error:
            raise FrameError(f"shared memory cannot be mapped here: {error}") from error
        return content, buffers

    def _read(self, size: int) -> Any:
        early = self._early
        if size > early.nbytes:
            return self._own(size)
        self._early = early[size:]
        return early[:size]

    def _own(self, size: int) -> bytearray:
        """Read what can be written to afterwards."""
        data = bytearray(size)
        view, early = memoryview(data), self._early[:size]
        view[: early.nbytes] = early
        view, self._early = view[early.nbytes :], self._early[early.nbytes :]
        while view.nbytes:
            got = self._socket.recv_into(view)
            if got == 0:
                raise FrameError("closed in the middle of a message", is_end=True)
            view = view[got:]
        return data

    @early_bound
    def hang_up(self) -> None:
        """Let the other side find the end when it next waits for a message."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # It is gone.

    @early_bound
    def close(self) -> None:
        """Close this end; arrays that came over it live on."""
        self._socket.close()
        self._out.close()
        self._in.close()


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
