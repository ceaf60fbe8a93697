"""Measure a call to a model in another process, beside two ways of the standard library.

Each call returns its argument: a number, or an array of several sizes. The peers are a pair of
`multiprocessing` pipes and `concurrent.futures`, with spawned processes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks.results_file import write
from torch_utils import ModelHost

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
ROUNDS = 5


class Echo:
    def echo(self, value: Any) -> Any:
        return value


def echo(value: Any) -> Any:
    return value


def answer(connection: Any) -> None:
    while (value := connection.recv()) is not None:
        connection.send(value)


def seconds(call: Callable[[Any], Any], value: Any, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call(value)
    return (time.perf_counter() - started) / count


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=answer, args=(theirs,))
    peer.start()

    def by_pipe(value: Any) -> Any:
        ours.send(value)
        return ours.recv()

    rows: list[dict[str, Any]] = []
    host = ModelHost(Echo, isolation="process")
    with ProcessPoolExecutor(1, mp_context=context) as pool, host, host.lease() as model:
        ways: dict[str, Callable[[Any], Any]] = {
            "ModelHost": model.echo,
            "multiprocessing.Pipe": by_pipe,
            "concurrent.futures": lambda value: pool.submit(echo, value).result(),
        }
        for size in (0, *SIZES):
            value = np.ones(size, np.uint8) if size else 1
            count = max(2, min(300, (1 << 24) // max(size, 1 << 14)))
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, call in ways.items():
                    times[name].append(seconds(call, value, count))
            us = {name: 1e6 * statistics.median(found) for name, found in times.items()}
            line = ", ".join(f"{name} {value:.0f} us" for name, value in us.items())
            print(f"{size:>10,} bytes: {line}", flush=True)
            rows.append({"bytes": size, "median_us": us})
    ours.send(None)
    peer.join()
    write("host", {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
