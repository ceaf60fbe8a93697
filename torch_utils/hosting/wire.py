"""Messages between a model's process and its parent: pickles over a socket.

The memory of large arrays is sent outside of the pickle (protocol 5, out-of-band), which saves a
copy.
"""

from __future__ import annotations

import mmap
import pickle
import socket
import struct
from typing import Any, NamedTuple

__all__ = ["Message", "dump", "load", "receive", "send"]

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers
_MAPPED_FROM = 4 << 20


class Message(NamedTuple):
    """A pickle and its out-of-band buffers."""

    content: Any
    buffers: list[Any]


def dump(value: object) -> Message:
    """Pickle a value.

    Raises:
        Exception: The value cannot be pickled. Classes may raise any exception.
    """
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return Message(content, [buffer.raw() for buffer in buffers])


def load(message: Message) -> Any:
    """Unpickle the result of `dump`."""
    return pickle.loads(message.content, buffers=message.buffers)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: The other end is closed, or does not read within the connection's timeout.
    """
    sizes = struct.pack(f"<{len(message.buffers)}Q", *(part.nbytes for part in message.buffers))
    head = _HEAD.pack(len(message.content), len(message.buffers)) + sizes + message.content
    for part in (head, *message.buffers):
        connection.sendall(part)


def receive(connection: socket.socket) -> Message:
    """Wait for a message. Its buffers belong to this process and are writable.

    Raises:
        EOFError: The other end is closed.
        OSError: The connection failed, or nothing came within its timeout.
    """
    length, count = _HEAD.unpack(_read(connection, _HEAD.size))
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    content = _read(connection, length)
    return Message(content, [_read(connection, size) for size in sizes])


def _read(connection: socket.socket, size: int) -> Any:
    data: Any
    if size < _MAPPED_FROM:
        data = bytearray(size)
    else:
        # Large pages: with small ones, page faults take longer than the copy.
        data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(data)
    while view.nbytes:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return data
