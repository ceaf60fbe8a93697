"""A model for the tests of hosts, and what many of them need."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

from programs import TIMEOUT_S


class Stub:
    """Notes its life, and fails if it is used after it was closed."""

    made: ClassVar[list[Stub]] = []

    def __init__(self) -> None:
        self.closed = 0
        type(self).made.append(self)

    def use(self) -> int:
        assert not self.closed
        return 1

    def close(self) -> None:
        self.closed += 1


def in_threads(count: int, work) -> list[BaseException]:
    """Run in as many threads at once; what they raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
