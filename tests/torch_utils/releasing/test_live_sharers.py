"""release of a tensor: what shares its C++ tensor or its memory goes on and is right.

Each program runs by itself, for the unsafe way ends in a crash or in wrong numbers: swapping
``tensor.data``, which release once did, changes the C++ tensor that the others share.
"""

from __future__ import annotations

import textwrap

import pytest

from support.older_torch import TORCH
from support.programs import assert_clean, run_forked

PRELUDE = """
import gc, sys, threading, time, warnings
import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch_utils import release

def unsafe(tensor):
    if tensor.is_leaf:
        tensor.grad = None
    with torch.no_grad():
        tensor.data = torch.empty(0, dtype=tensor.dtype)

give_up = unsafe if sys.argv[1] == "unsafe" else release

def overwrite():
    # Freed memory has these numbers afterwards, or is not mapped any more.
    return [torch.full((count,), 7.0) for count in (4, 1000, 1_000_000) for _ in range(50)]

def wait_until_busy(thread):
    # Until it is in C++ and holds no GIL, which its processor time tells.
    clock = time.pthread_getcpuclockid(thread.ident)
    start = time.clock_gettime(clock)
    while thread.is_alive() and time.clock_gettime(clock) < start + 0.02:
        time.sleep(0.001)
"""

PROGRAMS = {
    "numpy from dlpack": """
        tensor = torch.ones(1_000_000)
        other = np.from_dlpack(tensor)
        give_up(tensor)
        kept = overwrite()
        assert other.min() == other.max() == 1
    """,
    "torch from dlpack": """
        tensor = torch.ones(1_000_000)
        other = torch.from_dlpack(tensor)
        give_up(tensor)
        kept = overwrite()
        assert other.min() == other.max() == 1
    """,
    "a function at work in a thread": """
        torch.set_num_threads(1)
        tensor = torch.rand(5_000_000)
        expected = torch.lgamma(tensor)
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.lgamma(tensor)))
        thread.start()
        wait_until_busy(thread)
        give_up(tensor)
        kept = overwrite()
        thread.join()
        assert torch.equal(found[0], expected)
    """,
    "a gradient of one element": """
        weight = torch.ones(1, requires_grad=True)
        inputs = torch.ones(1, requires_grad=True)
        loss = (inputs * weight).sum()
        give_up(weight)
        loss.backward()
        assert inputs.grad.tolist() == [1.0], inputs.grad
    """,
    "a pending collective": """
        import torch.distributed as dist
        store = dist.HashStore()
        group = dist.ProcessGroupGloo(store, 0, 1)
        tensor = torch.ones(20_000_000)
        other = tensor.numpy()
        work = group.allreduce([tensor])
        give_up(tensor)
        del other
        kept = overwrite()
        work.wait()
    """,
    "a numpy view": """
        tensor = torch.ones(1_000_000)
        other = tensor.numpy()[10:]
        give_up(tensor)
        kept = overwrite()
        assert other.min() == other.max() == 1
    """,
}
# What the unsafe way does there depends on who comes first, or goes well.
WITHOUT_CONTROL = {"a pending collective", "a numpy view"}
if TORCH < (2, 11):  # DLPack's consumers had a tensor of their own.
    WITHOUT_CONTROL |= {"torch from dlpack", "numpy from dlpack"}


def program(name: str) -> str:
    return PRELUDE + textwrap.dedent(PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_live_sharers_stay_correct(name: str) -> None:
    assert_clean(run_forked(program(name), "release", quick_end=True))


def test_output_of_compiled_cuda_graph_stays() -> None:
    program = """
    import torch
    from torch_utils import release
    kept, other = torch.ones(100), torch.ones(100)
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(kept)
    report = release([kept, other])
    assert report.errors == ()
    assert [held.nbytes for held in report.still_held] == [400]
    assert kept.numel() == 100 and other.numel() == 0
    release(kept)
    assert kept.numel() == 100
    torch._C._remove_cached_tensor(kept)
    torch._C._set_cached_tensors_enabled(False)
    release(kept)
    assert kept.numel() == 0
    """
    assert_clean(run_forked(program, quick_end=True))
