"""A service at work on a real port, and a headless Chromium to look at it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tests.support.serving import Embedder, make_app

CHROMIUM = Path("/usr/bin/chromium")
HOW = "needs the dependency group service-test, and /usr/bin/chromium: apt-get install chromium"


@contextlib.contextmanager
def serving_on_a_port(index: Path, load_model: Any = Embedder, **options: Any) -> Iterator[str]:
    """Serve from a thread; yields the address."""
    app = make_app(index, load_model, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not (server.started and app.state.service.lanes["model"].has_loaded):
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium; it has a profile of its own, and ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield started
        finally:
            started.close()
