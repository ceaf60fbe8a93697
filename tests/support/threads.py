"""Functions in threads that start at the same moment."""

import threading
from collections.abc import Callable
from typing import Any

from tests.support.programs import TIMEOUT_S


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all at once; return what they returned or raised."""
    results: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:  # Whatever it is, the test is to see it.
            results[index] = error

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"{thread.name} has not ended in {TIMEOUT_S} s"
    return results


def errors_in_threads(*functions: Callable[[], Any]) -> list[BaseException]:
    """Run each in a thread of its own, all at once; return what they raised."""
    return [result for result in in_threads(*functions) if isinstance(result, BaseException)]
