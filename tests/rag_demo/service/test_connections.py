"""Clients that say nothing, or half of something, or do not read: each is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from serving import TEXTS  # noqa: F401  (Skips where the service's packages are missing.)
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rag_demo.service.connections import protocol_for
from rag_demo.service.settings import Limits

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG = 60 << 20


async def answer(scope: Any, receive: Any, send: Any) -> None:
    size = LONG if scope["path"] == "/long" else 2
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * size})


def with_server(limits: Limits | None, use: Callable[[int], Any]) -> Any:
    """Serve on loopback; uvicorn's own protocol, the control, where there are no limits."""

    async def main() -> Any:
        config = uvicorn.Config(answer, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        protocol = H11Protocol if limits is None else protocol_for(limits)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        try:
            return await asyncio.wait_for(use(server.sockets[0].getsockname()[1]), 60)
        finally:
            server.close()
            for connection in list(state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    return asyncio.run(main())


async def is_cut_off(reader: asyncio.StreamReader, wait_s: float) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), wait_s) == b""
    except ConnectionError:
        return True
    except asyncio.TimeoutError:
        return False


@pytest.mark.parametrize("said", [b"", b"GET / HT", REQUEST[:-2]])
def test_silent_and_half_open_connections(said: bytes) -> None:
    """They have a time for a whole head; uvicorn itself would wait for ever."""

    async def use(port: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        cut_off = await is_cut_off(reader, 30 if limits else 0.6)
        writer.close()
        return cut_off

    limits: Limits | None = Limits(header_s=0.2)
    assert with_server(limits, use)
    limits = None
    assert not with_server(limits, use)


def test_dripping_is_no_progress() -> None:
    """A byte now and then does not start the time anew, in a later request either."""

    async def use(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert b"200" in await reader.readline()
        sent = 0
        while not reader.at_eof() and sent < 1000:
            writer.write(b"G")
            sent += 1
            await asyncio.sleep(0.02)
            with_data = asyncio.ensure_future(reader.read(1000))
            await asyncio.wait({with_data}, timeout=0.02)
            with_data.cancel()
            try:
                await with_data
            except (asyncio.CancelledError, ConnectionError):
                pass
            if reader.exception() is not None:
                break
        writer.close()
        return sent

    assert with_server(Limits(header_s=0.2), use) < 1000


def test_the_longest_silent_goes_first() -> None:
    """Ten thousand that say nothing leave room for one that asks."""

    async def use(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert b"200" in await reader.readline()
        assert await is_cut_off(silent[0][0], 30)
        assert not await is_cut_off(silent[-1][0], 0.1)
        for _, other in [*silent, (reader, writer)]:
            other.close()

    with_server(Limits(connections=10), use)


def test_a_client_that_does_not_read() -> None:
    """What it was sent is not kept for ever."""

    async def use(port: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(REQUEST.replace(b"/ ", b"/long "))
        await asyncio.sleep(1)  # It reads nothing, and its buffers are full.
        received = 0
        try:
            while data := await reader.read(1 << 20):
                received += len(data)
        except ConnectionError:
            pass
        writer.close()
        return received < LONG

    assert with_server(Limits(send_s=0.1), use)
