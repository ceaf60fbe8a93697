"""Compare releases of models with other ways, and `measure` with Triton's timer."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torch_utils
from benchmarks.gpu_setting import GB, Setting
from benchmarks.release_cell import beside_a_thread

Held = dict[str, Any]


def tensors_of(nbytes: int, each: int, device: str) -> Any:
    """Return a model with ``nbytes`` of unwritten parameters of ``each`` bytes."""
    model = torch.nn.Module()
    for number in range(max(1, nbytes // each)):
        values = torch.empty(each // 4, device=device)
        model.register_parameter(f"p{number}", torch.nn.Parameter(values))
    return model


def bert(setting: Setting) -> Any:
    """Return a BERT base with random weights."""
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 1, "vocab_size": 100} if setting.rehearse else {}
    with torch.device(setting.device):
        return BertModel(BertConfig(**sizes))


def _ours(held: Held) -> None:
    torch_utils.release(held["model"])  # The variable remains.


def _by_hand(held: Held) -> None:
    del held["model"]
    gc.collect()
    torch.cuda.empty_cache()


def _accelerate(held: Held) -> None:
    from accelerate.utils import release_memory

    (held["model"],) = release_memory(held.pop("model"))


WAYS: dict[str, Callable[[Held], None]] = {
    "torch_utils": _ours,
    "del, gc.collect, empty_cache": _by_hand,
    "accelerate": _accelerate,
}


def release_beside_others(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure a BERT, also while a variable names it, and 10 GB in large and in small tensors."""
    torch_utils.release()  # Import its modules before the measurement.
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate.utils  # noqa: F401
    if importlib.util.find_spec("transformers") is not None:
        for is_named in (True, False):
            row = {"model": "BERT base", "another_variable": is_named}
            yield row | _ways(setting, lambda: bert(setting), is_named=is_named)
    total = (4 << 20) if setting.rehearse else min(10 * GB, setting.room_bytes() // 2)
    for each in (total // 4, 1 << 18) if setting.rehearse else (256 << 20, 1 << 20):
        row = {"model": "tensors", "model_bytes": total, "tensor_bytes": each}
        yield row | _ways(setting, lambda: tensors_of(total, each, setting.device))  # noqa: B023


def _ways(setting: Setting, make: Callable[[], Any], *, is_named: bool = False) -> dict[str, Any]:
    """Measure each way three times by turns."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if setting.rehearse else 3):
        for name, way in WAYS.items():
            if name == "accelerate" and importlib.util.find_spec("accelerate") is None:
                continue
            if setting.seconds_left() > 1:
                runs.setdefault(name, []).append(_once(setting, way, make, is_named=is_named))
    if not runs:
        return {"left_out": "no time"}
    return {"ways": {name: _middle(some) for name, some in runs.items()}}


def _once(
    setting: Setting, way: Callable[[Held], None], make: Callable[[], Any], *, is_named: bool
) -> dict[str, float]:
    setting.tidy()
    before = setting.reserved_bytes()
    held = {"model": make()}
    also_named = held["model"] if is_named else None
    setting.synchronize()
    full = setting.reserved_bytes()
    taken = beside_a_thread(lambda: way(held))
    freed = full - setting.reserved_bytes()
    del also_named
    held.clear()
    return {
        "ms": taken["ms"],
        "longest_wait_ms": taken["worst_stall_ms"],
        "freed_bytes": freed,
        "freed_share": freed / max(1, full - before),
    }


def _middle(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the run with the median time, and all times."""
    middle = sorted(runs, key=lambda run: run["ms"])[len(runs) // 2]
    return {**middle, "all_ms": [round(run["ms"], 3) for run in runs]}


def measure_beside_triton(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compare the medians of both timers on work that no cache can hold."""
    side = 128 if setting.rehearse else 8192
    half = torch.float32 if setting.rehearse else torch.bfloat16
    left, right = (torch.randn(side, side, device=setting.device).to(half) for _ in range(2))
    source = torch.randn(1 << (18 if setting.rehearse else 28), device=setting.device)
    target = torch.empty_like(source)
    works = {"matrix product": lambda: left @ right, "copy": lambda: target.copy_(source)}
    for name, work in works.items():
        rounds = []
        for _ in range(1 if setting.rehearse else 3):
            ours = setting.timed(work, most=50)
            rounds.append((ours.median_s * 1e3, _peer_ms(setting, work)))
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        ratio = ratios[len(ratios) // 2]
        yield {"work": name, "ms_ours_and_theirs": rounds, "ratio": ratio, "ratios": ratios}


def _peer_ms(setting: Setting, work: Callable[[], Any]) -> float:
    """Return Triton's median, or that of CUDA events without Triton."""
    if setting.rehearse:
        return torch_utils.measure(work, warmup=1, repeat=5, device="cpu").median_s * 1e3
    if importlib.util.find_spec("triton") is not None:
        from triton.testing import do_bench

        return float(do_bench(work, warmup=25, rep=200, return_mode="median"))
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[10]
