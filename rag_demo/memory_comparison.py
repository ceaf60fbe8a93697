"""Compare how much memory `del`, a garbage collection and a scope release.

Each method runs in a process of its own. In one process, the second would reuse the first's heap.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from torch_utils import SafePyTorchCleanup, measuring, memory_snapshot, release

DEL, DEL_AND_COLLECT, SCOPE = "del model", "del model; gc.collect()", "with SafePyTorchCleanup()"
METHODS = (DEL, DEL_AND_COLLECT, SCOPE)
_TEXTS = 96


class MemoryRelease(NamedTuple):
    """The resident memory of a process that loaded, used and released a model.

    Attributes:
        method: How the model was released.
        taken_bytes: The growth of the process by loading the model and encoding.
        returned_bytes: The shrinkage of the process by the release.
        seconds: The duration of the release.
    """

    method: str
    taken_bytes: int
    returned_bytes: int
    seconds: float


def measure_release(method: str) -> MemoryRelease:
    """Load the packaged model, encode with it, and release it by one of `METHODS`."""
    import torch

    from rag_demo.embedding_model import load_encoder
    from rag_demo.encoding import bert_encoder  # noqa: F401
    from rag_demo.encoding.encoder import encode
    from rag_demo.encoding.model_identity import packaged_model

    # Code and thread pools are loaded once and stay, so they do not count as the model's memory.
    torch.ones(500, 500) @ torch.ones(500, 500)
    release()
    path = str(packaged_model())
    texts = [f"number {n} is about memory, caches and heaps. " * (1 + n % 8) for n in range(_TEXTS)]
    before = memory_snapshot()
    model = load_encoder(path, "cpu", "float32", {})
    encode(model, texts, "document", lambda rows, vectors: None)
    full = memory_snapshot()
    with measuring("cpu") as taken:
        if method == SCOPE:
            with SafePyTorchCleanup() as scope:
                scope.manage(model)  # After the block, the variable still refers to the model.
        else:
            del model
            if method == DEL_AND_COLLECT:
                gc.collect()
    after = memory_snapshot()
    grown, shrunk = (full - before).host.rss_bytes, (full - after).host.rss_bytes
    return MemoryRelease(method, grown, shrunk, taken.median_s)


def compare_releases() -> Iterator[MemoryRelease]:
    """Run each of `METHODS` in a process of its own."""
    for method in METHODS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield process.submit(measure_release, method).result()
