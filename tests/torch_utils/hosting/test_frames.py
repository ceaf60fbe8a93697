"""Messages are whole, of the right number, and say only what is so."""

from __future__ import annotations

import array
import marshal
import os
import socket
import struct

import pytest

from torch_utils.hosting import segments
from torch_utils.hosting.frames import Channel, FrameError

HEAD = struct.Struct("<4sIQQQ")


@pytest.fixture
def ends():
    pair = socket.socketpair()
    channels = [Channel(one) for one in pair]
    yield *channels, pair[0]
    for channel in channels:
        channel.close()


def message(number: int = 1, content: bytes = b"content", about: bytes = b"", rest: int = 0):
    return HEAD.pack(b"TUh1", len(about), number, len(content), rest) + about + content


def test_content_and_buffers_come_whole(ends) -> None:
    """Whatever their sizes, through the socket or beside it."""
    here, there, _ = ends
    for number, size in enumerate((0, 1, 20_000, 300_000, 2_000_000)):
        parts = [os.urandom(size) for _ in range(3)]
        here.send(number, parts[0], [memoryview(part) for part in parts[1:]])
        got, content, buffers = there.receive(number)
        assert (got, bytes(content), [*map(bytes, buffers)]) == (number, parts[0], parts[1:])


def test_what_is_too_large_to_be_kept_comes_too(ends, monkeypatch) -> None:
    """Its memory goes with the last buffer; other segments are not given up for nothing."""
    monkeypatch.setattr(segments, "KEPT_BYTES", 1 << 20)
    here, there, _ = ends
    for number, size in enumerate((3 << 20, 600_000, 900_000, 3 << 20, 600_000)):
        data = os.urandom(size)
        here.send(number, b"", [memoryview(data)])
        assert bytes(there.receive(number)[2][0]) == data
        there.send(number, b"")
        here.receive(number)
        assert sum(one.size for one in here._out._kept.values()) <= 1 << 20
    assert len(there._in._known) == len(here._out._kept) == 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the connection was closed"),
        (message()[:10], "closed in the middle"),
        (message()[:-1], "closed in the middle"),
        (b"print" + bytes(100), "begins with b'prin'"),
        (message(2), "message 2 came, not 1"),
        (message() + b"x", "1 bytes too many"),
        (message(about=b"nonsense"), "what cannot be"),
        (message(about=marshal.dumps((((7,), ()), None, ()))), "returned that was not lent"),
        (message(about=marshal.dumps((((), (7,)), None, ()))), "kept that was not lent"),
        (message(about=marshal.dumps((((), ()), None, (5,)))), "5 bytes of buffers, not 0"),
        (message(about=marshal.dumps((((), ()), (9, 5, 0, 1, (), ()), ()))), "not what was said"),
    ],
)
def test_what_is_wrong_is_refused(ends, data: bytes, why: str) -> None:
    """Cut off, not ours, of another call, too long, or about memory that is not there."""
    _, there, raw = ends
    raw.sendall(data)
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match=why):
        there.receive(1)


@pytest.mark.skipif(not segments.IS_POSSIBLE, reason="this system has no memfd")
@pytest.mark.parametrize("size", [4096, 8192])
def test_memory_that_could_shrink_is_refused(ends, size: int) -> None:
    """Reading behind its end would kill this process; so would a size that is not its own."""
    _, there, raw = ends
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    about = marshal.dumps((((), ()), (1, size, True, True, ((0, 10),), ()), ()))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    raw.sendmsg([message(content=b"", about=about)], rights)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FrameError, match="is not sealed, or has another size"):
        there.receive(1)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_without_shared_memory(ends, monkeypatch) -> None:
    """Where there is none, or no more of it, everything goes over the socket."""
    import threading

    here, there, _ = ends
    data = os.urandom(3_000_000)
    monkeypatch.setattr(os, "memfd_create", lambda *_: os.open("/nowhere", os.O_RDONLY))
    sender = threading.Thread(target=lambda: here.send(1, data, [memoryview(data)]))
    sender.start()
    _, content, buffers = there.receive(1)
    sender.join()
    assert bytes(content) == bytes(buffers[0]) == data


def test_memory_in_use_is_not_sent_twice(ends) -> None:
    """The sender uses a segment again when the receiver has said that nothing lies in it."""
    here, there, _ = ends
    held = []
    for number in range(4):
        here.send(number, b"", [memoryview(bytes([number]) * 300_000)])
        held.append(there.receive(number)[2][0])
        there.send(number, b"")
        here.receive(number)
    assert [one[0] for one in held] == [0, 1, 2, 3]
    assert len(here._out._kept) == 4
    del held[1:3]
    there.send(9, b"")
    here.receive(9)
    assert len(here._out._free) == 2


@pytest.mark.parametrize("keeps", [False, True], ids=["used again", "control: in use"])
def test_memory_that_is_sent_back_is_used_again(ends, keeps: bool) -> None:
    """An echo of arrays needs one segment each way; only who keeps what came makes it more."""
    here, there, _ = ends
    data = os.urandom(1_000_000)
    kept = []
    for number in range(5):
        here.send(number, b"", [memoryview(data)[: len(data) - 1000 * number]])
        received = there.receive(number)[2]
        kept.append(received[0] if keeps else None)
        there.send(number, b"", received)
        assert here.receive(number)[2] == [data[: len(data) - 1000 * number]]
    assert there._out._made == 1
    assert here._out._made == (5 if keeps else 1)


def test_small_array_does_not_hold_on_to_large_memory(ends) -> None:
    """What was made for more than twice as much is not taken, nor is much added to any size."""
    here, there, _ = ends
    for number, size in enumerate((3_000_000, 300_000)):
        here.send(number, b"", [memoryview(bytes(size))])
        there.receive(number)
        there.send(number, b"")
        here.receive(number)
    assert [one.size < 400_000 for one in here._out._free] == [False, True]
    assert all(
        size <= segments.rounded(size) <= 1.25 * size for size in range(1 << 18, 1 << 22, 999)
    )
