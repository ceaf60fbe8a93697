"""Compare releases of a 10 GB model with other ways, and `measure` with Triton's timer."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import torch_utils
from benchmarks.gpu_setting import GB, Setting
from benchmarks.release_cell import beside_a_thread


def model_of(nbytes: int, each: int, device: str) -> Any:
    """Return a model with ``nbytes`` of unwritten parameters of ``each`` bytes."""
    model = torch.nn.Module()
    for number in range(max(1, nbytes // each)):
        values = torch.empty(each // 4, device=device)
        model.register_parameter(f"p{number}", torch.nn.Parameter(values))
    return model


def _ours(held: dict[str, Any]) -> None:
    torch_utils.release(held["model"])  # The variable remains.


def _by_hand(held: dict[str, Any]) -> None:
    del held["model"]
    gc.collect()
    torch.cuda.empty_cache()


def _accelerate(held: dict[str, Any]) -> None:
    from accelerate.utils import release_memory

    (held["model"],) = release_memory(held.pop("model"))


WAYS: dict[str, Callable[[dict[str, Any]], None]] = {
    "torch_utils": _ours,
    "del, gc.collect, empty_cache": _by_hand,
    "accelerate": _accelerate,
}


def reserved(setting: Setting) -> int:
    return 0 if setting.rehearse else torch.cuda.memory_reserved(0)


def release_beside_others(setting: Setting) -> list[dict[str, Any]]:
    """Measure large and small layers, each way five times by turns."""
    total = (4 << 20) if setting.rehearse else min(10 * GB, setting.room_bytes() // 2)
    torch_utils.release()  # Import its modules before the measurement.
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate.utils  # noqa: F401
    results = []
    for each in (total // 4, 1 << 18) if setting.rehearse else (256 << 20, 1 << 20):
        runs: dict[str, list[tuple[float, float, int]]] = {}
        for _ in range(1 if setting.rehearse else 5):
            for name, way in WAYS.items():
                if name == "accelerate" and importlib.util.find_spec("accelerate") is None:
                    continue
                if setting.seconds_left() > 2:
                    runs.setdefault(name, []).append(_once(setting, way, total, each))
        results.append({"model_bytes": total, "tensor_bytes": each, "ways": _summed_up(runs)})
    return results


def _once(
    setting: Setting, way: Callable[..., None], total: int, each: int
) -> tuple[float, float, int]:
    setting.tidy()
    held = {"model": model_of(total, each, setting.device)}
    setting.synchronize()
    full = reserved(setting)
    taken = beside_a_thread(lambda: way(held))
    freed = full - reserved(setting)
    held.clear()
    return taken["ms"], taken["worst_stall_ms"], freed


def _summed_up(runs: dict[str, list[tuple[float, float, int]]]) -> dict[str, Any]:
    found = {}
    for name, times in runs.items():
        middle = len(times) // 2
        found[name] = {
            "ms": sorted(ms for ms, _, _ in times)[middle],
            "longest_wait_ms": sorted(wait for _, wait, _ in times)[middle],
            "freed_bytes": min(freed for _, _, freed in times),
            "all_ms": [round(ms, 3) for ms, _, _ in times],
        }
        print(
            f"{name:30} {found[name]['ms']:9.2f} ms, another thread waits "
            f"{found[name]['longest_wait_ms']:.2f} ms, {found[name]['freed_bytes']:,} bytes back"
        )
    return found


def measure_beside_triton(setting: Setting) -> list[dict[str, Any]]:
    """Compare the medians of both timers on work that no cache can hold."""
    side = 128 if setting.rehearse else 8192
    half = torch.float32 if setting.rehearse else torch.bfloat16
    left, right = (torch.randn(side, side, device=setting.device).to(half) for _ in range(2))
    source = torch.randn(1 << (18 if setting.rehearse else 28), device=setting.device)
    target = torch.empty_like(source)
    works = {"matrix product": lambda: left @ right, "copy": lambda: target.copy_(source)}
    results = []
    for name, work in works.items():
        rounds = []
        for _ in range(1 if setting.rehearse else 3):
            ours = torch_utils.measure(
                work, warmup=5, repeat=3 if setting.rehearse else 50, device=setting.device
            )
            rounds.append((ours.median_s * 1e3, _triton_ms(setting, work)))
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        ratio = ratios[len(ratios) // 2]
        results.append({"work": name, "ms_ours_and_theirs": rounds, "ratio": ratio})
        print(f"{name:16} ratio {ratio:.4f} (from {ratios[0]:.4f} to {ratios[-1]:.4f})")
    return results


def _triton_ms(setting: Setting, work: Callable[[], Any]) -> float:
    if setting.rehearse:
        return torch_utils.measure(work, warmup=1, repeat=5, device="cpu").median_s * 1e3
    from triton.testing import do_bench

    return float(do_bench(work, warmup=25, rep=200, return_mode="median"))
