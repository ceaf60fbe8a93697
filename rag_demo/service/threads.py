"""DaemonThread: a thread that the interpreter does not join at exit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonThread:
    """Runs calls one after the other in a daemon thread, until `stop`.

    The interpreter joins the threads of `concurrent.futures` at exit, so a call that hangs would
    keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        # A thread that waits in C, as in SimpleQueue, would make `release` keep tensors.
        self._calls: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Queue a call and return its future in the running event loop."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread after the calls that are queued now."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function, arguments = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except Exception as error:  # For the caller.
                    future.set_exception(error)
                except BaseException as error:  # A panic or SystemExit must not end the loop.
                    future.set_exception(RuntimeError(f"the call raised {error!r}"))
            del item, future, function, arguments
