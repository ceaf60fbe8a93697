"""Messages between a model's process and its parent: pickles over a socket.

The memory of large arrays is sent outside of the pickle (protocol 5, out-of-band), which saves a
copy.
"""

from __future__ import annotations

import io
import mmap
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Message", "dump", "load", "receive", "send"]

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers
_MAPPED_FROM = 4 << 20
_PARTS_AT_ONCE = 64  # fewer than any system's IOV_MAX


class Message(NamedTuple):
    """A pickle and its out-of-band buffers."""

    content: Any
    buffers: list[Any]


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, check: Callable[[str, str], str]) -> None:
        super().__init__(io.BytesIO(message.content), buffers=message.buffers)
        self._check = check

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(self._check(module, name), name)


def dump(value: object) -> Message:
    """Pickle a value.

    Raises:
        Exception: The value cannot be pickled. Classes may raise any exception.
    """
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return Message(content, [buffer.raw() for buffer in buffers])


def load(message: Message, check: Callable[[str, str], str]) -> Any:
    """Unpickle a value.

    Args:
        message: The result of `dump`.
        check: Takes a module and a name; returns the module to import, or raises to refuse it.
    """
    return _Unpickler(message, check).load()


def send(connection: socket.socket, message: Message, deadline: float | None = None) -> None:
    """Send a message.

    Raises:
        TimeoutError: The deadline (by `time.monotonic`) has passed.
        OSError: The other end is closed.
    """
    sizes = struct.pack(f"<{len(message.buffers)}Q", *(part.nbytes for part in message.buffers))
    head = _HEAD.pack(len(message.content), len(message.buffers)) + sizes
    parts = [memoryview(part).cast("B") for part in (head, message.content, *message.buffers)]
    left = [part for part in parts if part.nbytes]
    while left:
        _limit(connection, deadline)
        sent = connection.sendmsg(left[:_PARTS_AT_ONCE])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket, deadline: float | None = None) -> Message:
    """Wait for a message. Its buffers belong to this process and are writable.

    Raises:
        TimeoutError: The deadline (by `time.monotonic`) has passed.
        EOFError: The other end is closed.
        OSError: The connection failed.
    """
    length, count = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count, deadline))
    content = _read(connection, length, deadline)
    return Message(content, [_read(connection, size, deadline) for size in sizes])


def _read(connection: socket.socket, size: int, deadline: float | None) -> Any:
    data: Any = bytearray() if size >= _MAPPED_FROM else bytearray(size)
    if size >= _MAPPED_FROM:
        # Large pages: with small ones, page faults take longer than the copy.
        data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            data.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(data)
    while view.nbytes:
        _limit(connection, deadline)
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return data


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
