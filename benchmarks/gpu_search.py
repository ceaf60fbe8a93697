"""Compare exact search with `mm` and `topk`, and with `semantic_search`.

The floor is the time to read the vectors once at the rate of a copy. `rag_demo` takes vectors from
host memory and returns documents in host memory; the others take and return tensors of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_setting import Setting
from rag_demo import PyTorchGPURetriever

DIMENSION, TOP_K = 384, 10
ROWS_AT_ONCE = 1 << 18
SIZES, BATCHES, DTYPES = (1_000_000, 10_000_000), (1, 32, 512), ("float16", "float32")


def unit_vectors(count: int, device: str, seed: int) -> Any:
    """Return random vectors of length 1, shape (count, 384), float32, on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.empty(count, DIMENSION, device=device)
    for rows in made.split(ROWS_AT_ONCE):
        rows.normal_(generator=generator)
        rows /= rows.norm(dim=1, keepdim=True)
    return made


class Vectors:
    """An embedding model whose vectors exist already; a text is the number of its vector."""

    name, dimension = "bench", DIMENSION

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def embed_documents(self, texts: Sequence[str]) -> Any:
        return self.documents[np.fromiter(map(int, texts), np.int64, len(texts))]

    embed_queries = embed_documents

    def embed_query(self, text: str) -> Any:
        return self.documents[int(text)]


def search(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure all sizes that fit and for which the time suffices."""
    add_s_per_row = 0.0
    for count in (1_000,) if setting.rehearse else SIZES:
        if count * DIMENSION * 8 > setting.room_bytes():
            yield {"rows": count, "left_out": "the card is too small"}
            continue
        if add_s_per_row * count > setting.seconds_left() - 10:
            seconds = round(add_s_per_row * count)
            yield {"rows": count, "left_out": f"adding the documents takes {seconds} s"}
            continue
        base = unit_vectors(count, setting.device, 1)
        documents = base.cpu().numpy()
        for dtype in DTYPES:
            if add_s_per_row * count > setting.seconds_left() - 10:
                yield {"rows": count, "dtype": dtype, "left_out": "no time"}
                continue
            started = time.monotonic()
            with PyTorchGPURetriever(
                Vectors(documents), device=setting.device, dtype=dtype, language="none"
            ) as retriever:
                names = list(map(str, range(count)))
                retriever.add(names, ids=names, vectors=documents)
                add_s_per_row = (time.monotonic() - started) / count
                yield from _rows(setting, retriever, base)
            setting.tidy()
        del base, documents
        setting.tidy()


def _rows(setting: Setting, retriever: Any, base: Any) -> Iterator[dict[str, Any]]:
    dtype, count = retriever.dtype, len(base)
    vectors = base.to(getattr(torch, dtype))
    for batch in BATCHES[:2] if setting.rehearse else BATCHES:
        row: dict[str, Any] = {"rows": count, "dtype": dtype, "batch": batch, "top_k": TOP_K}
        if setting.seconds_left() < 4:
            yield row | {"left_out": "no time"}
            continue
        queries = unit_vectors(batch, setting.device, 2)
        times = _times(setting, retriever, vectors, queries)
        row |= {f"{name}_ms": 1e3 * seconds for name, seconds in times.items()}
        if count * batch * 8 < setting.room_bytes():
            row["agrees"] = _agreement(retriever, base, queries)
        yield row


def _agreement(retriever: Any, base: Any, queries: Any) -> float:
    """Return the share of the best rows by `topk` that the retriever finds."""
    best = torch.topk(queries @ base.T, TOP_K).indices.tolist()
    texts = [""] * len(queries)
    found = retriever.search_batch(texts, TOP_K, mode="dense", vectors=queries.cpu().numpy())
    ids = [{int(result.id) for result in results} for results in found]
    hits = sum(len(some & set(rows)) for some, rows in zip(ids, best, strict=True))
    return hits / queries.shape[0] / TOP_K


def _times(setting: Setting, retriever: Any, vectors: Any, queries: Any) -> dict[str, float]:
    texts, in_host = [""] * len(queries), queries.cpu().numpy()
    on_device = queries.to(vectors.dtype)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: retriever.search_batch(texts, TOP_K, mode="dense", vectors=in_host)
    }
    if len(vectors) * len(queries) * 2 * vectors.element_size() < setting.room_bytes():
        ways["mm_topk"] = lambda: torch.topk(on_device @ vectors.T, TOP_K)
    try:
        from sentence_transformers import util
    except ImportError:
        pass
    else:
        # For vectors of length 1 dot products are cosines, and they need no copy.
        ways["semantic_search"] = lambda: util.semantic_search(
            on_device, vectors, top_k=TOP_K, query_chunk_size=512, score_function=util.dot_score
        )
    return {name: setting.timed(way, most=10).median_s for name, way in ways.items()}
