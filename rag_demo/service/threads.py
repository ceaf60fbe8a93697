"""A thread that the end of the program does not wait for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["DaemonThread"]


class DaemonThread:
    """Runs calls one after the other in a daemon thread, until `stop`.

    The threads of `concurrent.futures` are joined at exit, so a call that hangs would keep the
    process from ending.
    """

    def __init__(self, name: str) -> None:
        # Not a SimpleQueue: a thread that waits in C seems to `release` to use a tensor.
        self._calls: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Return a future of the running event loop for the call."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function, arguments = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*arguments)
            except Exception as error:  # The caller gets it.
                future.set_exception(error)
            except BaseException as error:  # A panic or SystemExit must not end the event loop.
                future.set_exception(RuntimeError(f"the call raised {error!r}"))
            else:
                future.set_result(result)
            del item, future, function, arguments
