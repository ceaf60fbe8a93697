"""The address that is listened on: how it is taken, and how newcomers are kept out at the end."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

from rag_demo.errors import RagDemoError
from rag_demo.service.settings import Settings

__all__ = ["WAITING", "bind", "refuse_newcomers"]

WAITING = 2048
"""Connections that the system holds until they are accepted."""
# Python has no name for it; the number is that of Linux, but for processors of SPARC and PA-RISC,
# where it is refused.
_SO_ATTACH_FILTER = 26
# Linux' classic BPF: load the byte of TCP's flags, and drop the packet where SYN is set, which is
# the first packet of a connection. Those that are open, or about to be, lose nothing.
_WITHOUT_SYN = (
    (0x30, 0, 0, 13),  # ldb [13]
    (0x45, 1, 0, 0x02),  # jset SYN: to the last line
    (0x06, 0, 0, 0xFFFFFFFF),  # ret: keep all of it
    (0x06, 0, 0, 0),  # ret: drop it
)


def bind(settings: Settings) -> socket.socket:
    """Take the address.

    Raises:
        RagDemoError: It cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # By its protocol's name, or asyncio does not know that Nagle's algorithm can be switched off:
    # each answer would wait until the client has acknowledged its head, which takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(WAITING)
    except (OSError, OverflowError) as error:
        listener.close()
        raise RagDemoError(
            f"{settings.host}:{settings.port} cannot be listened on: {error}; name another --port"
        ) from None
    listener.set_inheritable(True)
    return listener


def refuse_newcomers(listener: socket.socket) -> None:
    """Have the system let in nobody more, in no process that listens on the same.

    Who has been let in can still be accepted. Without this, who is let in between the last look
    at them and the closing is cut off. A client that comes now asks again after a second, by TCP's
    rules, and is refused then, where the listener is closed. Only on Linux; elsewhere nothing
    happens.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *line) for line in _WITHOUT_SYN)
    kept = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):  # A system like Linux, which has no such filters.
        listener.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_WITHOUT_SYN), ctypes.addressof(kept)),
        )
