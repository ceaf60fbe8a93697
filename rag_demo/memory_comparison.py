"""What a model gives back by `del` and by a scope: the same model, each way in its own process.

In one process the first way would leave its heap to the second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from rag_demo.errors import RagDemoError
from torch_utils import SafePyTorchCleanup, measuring, memory_snapshot, release

__all__ = ["WAYS", "MemoryRelease", "measure_release", "compare_releases"]

DEL, DEL_AND_COLLECT, SCOPE = "del model", "del model; gc.collect()", "with SafePyTorchCleanup()"
WAYS = (DEL, DEL_AND_COLLECT, SCOPE)
_TEXTS = 96
_LONGEST_S = 120.0  # of one process, which takes some three seconds


class MemoryRelease(NamedTuple):
    """What became of a model's memory: resident bytes of the process.

    Attributes:
        way: How it was given back.
        weights_bytes: Of the model itself.
        taken_bytes: By how much loading it and encoding with it made the process larger.
        returned_bytes: By how much giving it back made the process smaller.
        seconds: That giving back took.
    """

    way: str
    weights_bytes: int
    taken_bytes: int
    returned_bytes: int
    seconds: float


def measure_release(way: str) -> MemoryRelease:
    """Load the packaged model, encode with it, and give it back in one of `WAYS`."""
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch

    from rag_demo.encoding.packaged_model import packaged_model

    # Code and thread pools, which come once and stay, are no part of what a model takes.
    torch.ones(500, 500) @ torch.ones(500, 500)
    release()
    path = str(packaged_model())
    before = memory_snapshot()
    with contextlib.ExitStack() as stack:
        scope = stack.enter_context(SafePyTorchCleanup()) if way == SCOPE else None
        model = _used_model(path)
        if scope is not None:
            scope.manage(model)
        weights = sum(weight.nbytes for weight in model.buffers())
        full = memory_snapshot()
        with measuring("cpu") as taken:
            if scope is not None:
                stack.close()  # The end of its block; the variable lives on.
            else:
                del model
                if way == DEL_AND_COLLECT:
                    gc.collect()
    after = memory_snapshot()
    grown, shrunk = (full - before).host.rss_bytes, (full - after).host.rss_bytes
    return MemoryRelease(way, weights, grown, shrunk, taken.median_s)


def _used_model(path: str) -> Any:
    from rag_demo.encoding.load_encoder import load_encoder

    model = load_encoder(path, name="the packaged model", device="cpu", dtype="float32")
    texts = [f"number {n} is about memory, caches and heaps. " * (1 + n % 8) for n in range(_TEXTS)]
    model.encode(model.prepare(texts, "document"), 32)
    return model


def compare_releases(on_progress: Callable[[int], object]) -> list[MemoryRelease]:
    """Give the model back in each of `WAYS`, by turns, each in a process of its own.

    Args:
        on_progress: Called with 1 whenever one is done.

    Raises:
        RagDemoError: A process failed.
    """
    found = []
    for way in WAYS:
        program = "from rag_demo.memory_comparison import main; main()"
        try:
            done = subprocess.run(
                [sys.executable, "-c", program, way],
                capture_output=True,
                text=True,
                check=True,
                timeout=_LONGEST_S,
            )
        except subprocess.CalledProcessError as error:
            said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            raise RagDemoError(f"giving a model back by {way!r} failed: {said}") from None
        except subprocess.TimeoutExpired:
            raise RagDemoError(
                f"giving a model back by {way!r} took more than {_LONGEST_S:.0f} s; "
                "try again when the machine is less busy"
            ) from None
        found.append(MemoryRelease(*json.loads(done.stdout)))
        on_progress(1)
    return found


def main() -> None:
    """Be one of the processes: the way is the argument, what was measured goes to stdout."""
    sys.stdout.write(json.dumps(measure_release(sys.argv[1])))
