"""Tests of what shares a released tensor's C++ tensor or its memory: it stays correct.

Each program runs by itself, because a failure may be a crash.
"""

from tests.support.programs import assert_clean, run_forked

PRELUDE = """
import threading, time, warnings
warnings.filterwarnings("ignore", "Deallocating Tensor")  # torch 2.4
import torch
from torch_utils import release

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

SHARERS = """
# A function at work in a thread.
torch.set_num_threads(1)
tensor = torch.rand(5_000_000)
expected = torch.lgamma(tensor)
found = []
thread = threading.Thread(target=lambda: found.append(torch.lgamma(tensor)))
thread.start()
wait_until_busy(thread)
release(tensor)
kept = overwrite()
thread.join()
assert torch.equal(found[0], expected)

# A gradient of one element.
weight = torch.ones(1, requires_grad=True)
inputs = torch.ones(1, requires_grad=True)
loss = (inputs * weight).sum()
release(weight)
loss.backward()
assert inputs.grad.tolist() == [1.0], inputs.grad

# A pending collective.
import torch.distributed as dist
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
tensor = torch.ones(20_000_000)
work = group.allreduce([tensor])
release(tensor)
kept = overwrite()
work.wait()

# A numpy view.
tensor = torch.ones(1_000_000)
other = tensor.numpy()[10:]
release(tensor)
kept = overwrite()
assert other.min() == other.max() == 1
"""


def test_what_shares_memory_with_a_released_tensor_stays_correct() -> None:
    assert_clean(run_forked(PRELUDE + SHARERS, quick_end=True))


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
