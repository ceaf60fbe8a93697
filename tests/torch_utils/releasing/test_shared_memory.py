"""Tests of what shares a released tensor's C++ tensor: it stays correct.

They run in a program of their own, because a failure may be a crash.
"""

from tests.support.programs import assert_clean, run_forked

SHARERS = """
import threading, time, warnings
warnings.filterwarnings("ignore", "Deallocating Tensor")  # torch 2.4
import torch
import torch.distributed as dist
from torch_utils import release

def overwrite():
    # Freed memory has these numbers afterwards, or is not mapped any more.
    return [torch.full((count,), 7.0) for count in (4, 1000, 1_000_000) for _ in range(9)]

def wait_until_busy(thread):
    # Until it is in C++ and holds no GIL, which its processor time tells.
    clock = time.pthread_getcpuclockid(thread.ident)
    start = time.clock_gettime(clock)
    while thread.is_alive() and time.clock_gettime(clock) < start + 0.02:
        time.sleep(0.001)

# A function at work in a thread.
torch.set_num_threads(1)
tensor = torch.rand(3_000_000)
expected = torch.lgamma(tensor)
found = []
thread = threading.Thread(target=lambda: found.append(torch.lgamma(tensor)))
thread.start()
wait_until_busy(thread)
release(tensor)
kept = overwrite()
thread.join()
assert torch.equal(found[0], expected)

# A pending collective.
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
tensor = torch.ones(20_000_000)
work = group.allreduce([tensor])
release(tensor)
kept = overwrite()
work.wait()

# The output of a compiled CUDA graph, which torch returns again.
kept, other = torch.ones(100), torch.ones(100)
torch._C._set_cached_tensors_enabled(True)
torch._C._add_cached_tensor(kept)
report = release([kept, other])
assert report.errors == ()
assert [held.nbytes for held in report.still_held] == [400]
assert kept.numel() == 100 and other.numel() == 0
torch._C._remove_cached_tensor(kept)
torch._C._set_cached_tensors_enabled(False)
release(kept)
assert kept.numel() == 0
"""


def test_what_shares_a_released_tensor_stays_correct() -> None:
    """Arrays, views and graphs are tested in `tests/torch_utils/gpu/test_shared_use.py`."""
    assert_clean(run_forked(SHARERS, quick_end=True))
