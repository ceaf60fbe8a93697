"""Compare exact search with `mm` and `topk`, with `semantic_search`, and with a bare upload.

The floor is the time to read the vectors once at the rate of a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_setting import Setting
from rag_demo.exact_search.candidates import find_candidates
from rag_demo.exact_search.scan import Scan, StreamedScan, make_scan

DIMENSION, TOP_K = 384, 10
ROWS_AT_ONCE = 1 << 18
WIDTH = {"float32": 4, "float16": 2, "int8": 1}


def unit_vectors(count: int, device: str, seed: int) -> Any:
    """Return random vectors of length 1, shape (count, 384), float32, on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.empty(count, DIMENSION, device=device)
    for rows in made.split(ROWS_AT_ONCE):
        rows.normal_(generator=generator)
        rows /= rows.norm(dim=1, keepdim=True)
    return made


def rounded(base: Any, dtype: str) -> Any:
    """Return what a search scans, rounded as the retriever does it."""
    if dtype != "int8":
        return Scan.of_floats(base.to(getattr(torch, dtype)))
    parts = [make_scan(rows.cpu().numpy(), dtype, str(base.device)).tensors
             for rows in base.split(ROWS_AT_ONCE)]  # fmt: skip
    return Scan(*(torch.cat(part) for part in zip(*parts, strict=True)))


def finder(scan: Any, base: Any) -> Callable[[Any], Any]:
    """Return a function that finds the candidates of queries and scores them exactly."""
    return lambda queries: find_candidates(
        [scan], queries, TOP_K, lambda rows: fetch(base, rows).numpy()
    )


def fetch(base: Any, rows: Any) -> Any:
    """Return rows of the exact vectors in host memory."""
    return base[torch.from_numpy(rows).to(base.device)].float().cpu()


def agreement(found: tuple[Any, Any], base: Any, queries: Any, best: Any) -> float:
    """Return the share of the best rows by `topk` that were found."""
    rows_of = [set(found[1][found[0] == number].tolist()) for number in range(len(best))]
    hits = sum(len(rows & set(row.tolist())) for rows, row in zip(rows_of, best, strict=True))
    return hits / best.numel()


def search(setting: Setting) -> list[dict[str, Any]]:
    """Measure all sizes that fit, all dtypes and all batch sizes."""
    sizes = (1_000,) if setting.rehearse else (1_000_000, 10_000_000)
    results: list[dict[str, Any]] = []
    for count in sizes:
        if count * DIMENSION * 8 > setting.room_bytes():
            results.append({"rows": count, "left_out": "the card is too small"})
            continue
        base = unit_vectors(count, setting.device, 1)
        for dtype, width in WIDTH.items():
            scan = rounded(base, dtype)
            floor = count * DIMENSION * width / setting.rates["device_copy_bytes_per_s"]
            for batch in (1, 32) if setting.rehearse else (1, 32, 512):
                if setting.seconds_left() < 8:
                    row = {"rows": count, "dtype": dtype, "batch": batch}
                    results.append({**row, "left_out": "no time was left"})
                    continue
                results.append(_row(setting, base, scan, dtype, batch, floor))
                _show(results[-1])
            del scan
            setting.tidy()
        del base
        setting.tidy()
    return results


def _row(
    setting: Setting, base: Any, scan: Any, dtype: str, batch: int, floor: float
) -> dict[str, Any]:
    queries = unit_vectors(batch, setting.device, 2)
    in_host = queries.cpu().numpy()
    find = finder(scan, base)
    ours = setting.timed(lambda: find(in_host))
    row: dict[str, Any] = {"rows": len(base), "dtype": dtype, "batch": batch, "top_k": TOP_K}
    row |= {"ours_ms": ours.median_s * 1e3, "floor_ms": floor * 1e3}
    row["ours_ms_5_95"] = [ours.percentile_s(p) * 1e3 for p in (5, 95)]
    row["part_of_bandwidth"] = floor / ours.median_s
    if len(base) * batch * 8 < setting.room_bytes():
        best = torch.topk(queries @ base.T, TOP_K).indices
        row["agrees"] = agreement(find(in_host), base, queries, best.cpu())
    if dtype == "int8":
        return row
    vectors, asked = scan.vectors, queries.to(scan.vectors.dtype)
    if len(base) * batch * 2 * WIDTH[dtype] < setting.room_bytes():
        taken = setting.timed(lambda: torch.topk(asked @ vectors.T, TOP_K))
        row["mm_topk_ms"] = taken.median_s * 1e3
    semantic = _semantic_search()
    if semantic is not None:
        taken = setting.timed(lambda: semantic(asked, vectors), most=5)
        row["semantic_search_ms"] = taken.median_s * 1e3
    return row


def _semantic_search() -> Callable[[Any, Any], Any] | None:
    try:
        from sentence_transformers import util
    except ImportError:
        return None
    # For vectors of length 1 dot products are cosines, and they need no copy.
    return lambda asked, vectors: util.semantic_search(
        asked, vectors, top_k=TOP_K, query_chunk_size=512, score_function=util.dot_score
    )


def _show(row: dict[str, Any]) -> None:
    times = {name: row[name] for name in row if name.endswith("_ms")}
    shown = ", ".join(f"{name} {value:.3f}" for name, value in times.items())
    print(
        f"{row['rows']:>10,} {row['dtype']:8} {row['batch']:>4}: {shown}; "
        f"{row['part_of_bandwidth']:.0%} of the bandwidth, agrees {row.get('agrees')}",
        flush=True,
    )


def streamed(setting: Setting) -> dict[str, Any]:
    """Measure one query over vectors in host memory, beside the rate of a bare upload."""
    count = 4_000 if setting.rehearse else 4_000_000
    source = unit_vectors(count, setting.device, 1).cpu().numpy()
    setting.tidy()
    budget = source.nbytes // 3

    def read_into(start: int, out: Any) -> None:
        out[:] = source[start : start + len(out)]

    scan = StreamedScan(source.shape, setting.device, budget, read_into)
    base = torch.from_numpy(source)
    find = finder(scan, base)
    query = unit_vectors(1, setting.device, 2).cpu().numpy()
    taken = setting.timed(lambda: find(query), most=5, most_s=20)
    rate = source.nbytes / statistics.median(taken.host_s)
    result = {
        "rows": count,
        "bytes": source.nbytes,
        "budget_bytes": budget,
        "host_s": taken.host_s,
        "bytes_per_s": rate,
        "part_of_upload_rate": rate / setting.rates["host_to_device_bytes_per_s"],
    }
    print(f"{rate / 1e9:.1f} GB/s, {result['part_of_upload_rate']:.0%} of a bare upload")
    return result
