"""Each cache is cleared where it is in use, and nothing else is touched.

No GPU is needed: the program replaces the functions of torch that would reach one.
"""

import pytest

from tests.support.programs import assert_clean, run_forked

PROGRAM = """
import contextlib, gc, types
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch_utils import release
log = []
def note(name):
    return lambda *arguments: log.append(name)
class CUDAGraph:
    pass

torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.ipc_collect = note("ipc")
torch.cuda.CUDAGraph = CUDAGraph
torch.cuda.device = lambda index: contextlib.nullcontext(log.append(f"enter {index}"))
torch.cuda.is_current_stream_capturing = lambda: False
torch._C._cuda_clearCublasWorkspaces = note("cublas")
torch._C._cuda_hasPrimaryContext = lambda index: False
plans = [types.SimpleNamespace(clear=note(f"plans {index}")) for index in range(2)]
torch.backends.cuda.cufft_plan_cache = plans
torch.accelerator = types.SimpleNamespace(empty_host_cache=note("pinned"))
ALL = ["cublas", "plans 0", "plans 1", "ipc", "pinned"]

def clear(**options):
    log.clear()
    assert release([], **(options or {"thorough": True})).errors == ()
    return log

# All of them on a device, and by a thorough release only.
assert clear() == ALL, log
assert clear(collect="auto") == [], "the control"

# Workspaces stay beside a CUDA graph, which replays with the one that it was captured with.
graph = CUDAGraph()
assert clear() == ALL[1:], log
del graph

# Frozen cycles are collected.
holder = types.SimpleNamespace(tensor=torch.ones(1000))
holder.me = holder
storage = StorageWeakRef(holder.tensor.untyped_storage())
gc.freeze()
del holder
frozen = gc.get_freeze_count()
clear(collect="full")
assert not storage.expired(), "the control"
clear()
assert storage.expired()
assert gc.get_freeze_count() > 0.9 * frozen
gc.unfreeze()

# Only caches of devices on which memory was freed.
torch._C._cuda_hasPrimaryContext = lambda index: True
torch.cuda.memory_stats = lambda *arguments: {}
torch.cuda.mem_get_info = lambda *arguments: (0, 0)
torch.cuda.empty_cache = note("emptied")
release(torch.ones(1_000_000))
assert "emptied" not in [*log, *clear(collect="full", empty_cache=False)], log
assert clear(collect="full").count("emptied") == 1, "one call empties the caches of all devices"

# Nothing during a capture.
torch._C._cuda_hasPrimaryContext = lambda index: index == 1
torch.cuda.is_current_stream_capturing = lambda: log[-1] == "enter 1"
assert set(clear()) == {"enter 1"}, log
torch.cuda.is_current_stream_capturing = lambda: False
assert {*ALL, "emptied"} <= {*clear()}, log
"""


@pytest.mark.slow
def test_only_caches_in_use_are_cleared() -> None:
    assert_clean(run_forked(PROGRAM, quick_end=True))
