"""Newcomers at the end: nobody is let in whom nobody will answer."""

from __future__ import annotations

import errno
import select
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Embedder

from programs import TIMEOUT_S
from rag_demo.service import server
from rag_demo.service.listener import bind, refuse_newcomers
from rag_demo.service.running import SERVES
from rag_demo.service.settings import Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters packets")


def begin_to_connect(address: Any) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(address)
    return client


def came_of(client: socket.socket) -> int:
    """Wait until it is clear what becomes of it; returns the number of the error, 0 for none."""
    assert select.select([], [client], [], TIMEOUT_S)[1]
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@pytest.mark.parametrize("is_refused", [True, False])
def test_who_is_in_stays_and_nobody_new_comes(is_refused: bool) -> None:
    """In all processes that listen on the same, of which a copy is one."""
    listener = bind(Settings(index=Path(), port=0))
    address = listener.getsockname()
    with socket.create_connection(address, TIMEOUT_S) as before:
        if is_refused:
            with listener.dup() as copy:
                refuse_newcomers(copy)
        with begin_to_connect(address) as late:
            before.sendall(b"as ever")
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(100) == b"as ever"
                listener.close()
                accepted.sendall(b"an answer")
                assert before.recv(100) == b"an answer"
            # Without it, it was let in, and is cut off by the closing.
            assert came_of(late) == (errno.ECONNREFUSED if is_refused else errno.ECONNRESET)


@pytest.fixture
def service(index: Path) -> Iterator[tuple[socket.socket, socket.socket, Callable[..., None]]]:
    """A listener, the supervisor's end of the line, and what serves until it is told to stop."""
    settings = Settings(index=index, retriever="faiss", port=0)
    listener, (line, others) = bind(settings), socket.socketpair()

    def serve(**options: Any) -> None:
        server.run_server(settings, listener, load_model=Embedder, watched=line, **options)

    with line, others:
        yield listener, others, serve


@pytest.mark.parametrize("is_refused", [True, False])
def test_who_comes_after_the_last_look(
    is_refused: bool, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused, and may ask elsewhere; without the filter it is let in, and cut off."""
    listener, others, serve = service
    address, late = listener.getsockname(), []
    look = server._Server._accept_waiting

    async def look_and_then(self: Any, listener: socket.socket) -> None:
        await look(self, listener)
        late.append(begin_to_connect(address))

    monkeypatch.setattr(server._Server, "_accept_waiting", look_and_then)
    if not is_refused:
        monkeypatch.setattr(server, "refuse_newcomers", lambda listener: None)

    def tell(said: str) -> None:
        if said == SERVES:
            others.close()

    serve(tell=tell)
    with late[0]:
        assert came_of(late[0]) == (errno.ECONNREFUSED if is_refused else errno.ECONNRESET)


@pytest.mark.parametrize("others_serve", [True, False])
def test_others_who_serve_on_get_the_newcomers(
    others_serve: bool, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker of several that is told to stop must not close the door for all."""
    _, others, serve = service
    refused: list[Any] = []
    monkeypatch.setattr(server, "refuse_newcomers", refused.append)
    monkeypatch.setattr(server._Server, "on_tick", lambda self, counter: stop(self))

    async def stop(self: Any) -> bool:
        return True

    if not others_serve:
        others.shutdown(socket.SHUT_WR)
    serve()
    assert bool(refused) is not others_serve
