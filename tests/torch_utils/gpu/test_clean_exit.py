"""clean-exit finds remaining processes, shared tensors and process groups."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch.distributed

from clean_exit import check
from tests.support.programs import IMPORT_PATH


def assert_reported(
    device: Any, folder: Path, finding: str, programs: Sequence[str], **env: str
) -> None:
    """Check a dirty program and its clean twin in a file, which spawned processes can import."""
    path = folder / "program.py"
    paths = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")])
    reports = []
    for program in programs:
        path.write_text(device.source(program))
        report = check(
            [sys.executable, str(path)],
            timeout_s=device.limit_s,
            max_shutdown_s=device.limit_s,
            env={**os.environ, "PYTHONPATH": paths, **env},
        )
        # The twin would be clean if its program failed.
        assert report.returncode == 0, f"{report}\n{report.stdout}\n{report.stderr}"
        reports.append(report)
    dirty, clean = reports
    assert finding in {each.id for each in dirty.findings}, str(dirty)
    assert clean.clean, str(clean)


CHILD = """
import subprocess, sys, time
if sys.argv[1:]:
    device.make_context()
    print("ready", flush=True)
    time.sleep(600)
quiet = {{"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE, **quiet)
assert child.stdout.readline() == b"ready\\n"
{end}
"""


def test_remaining_child_is_reported(device: Any, tmp_path: Path) -> None:
    ends = (
        "child.returncode = 0  # The child outlives the program.",
        "child.kill(); child.wait(); child.stdout.close()",
    )
    programs = [CHILD.format(end=end) for end in ends]
    assert_reported(device, tmp_path, "orphan-process", programs)


SHARING = """
import multiprocessing, os, sys, time
import torch

def hold(queue, done):
    tensor = queue.get()
    done.set()
    time.sleep(3)
    print(float(tensor[0]), flush=True)

if __name__ == "__main__":
    import torch.multiprocessing
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    consumer = context.Process(target=hold, args=(queue, done), daemon=False)
    consumer.start()
    tensor = device.tensor(1 << 20)
    queue.put(tensor)
    done.wait()
    {end}
"""
EARLY = """
    multiprocessing.process._children.discard(consumer)  # Not joined at exit.
    if device.name != "cuda":
        # The warning of torch on a GPU.
        place = "[W1121 04:00:00.123456789 CudaIPCTypes.cpp:16]"
        what = "Producer process has been terminated before all shared CUDA tensors released."
        print(place, what, "See Note [Sharing CUDA tensors]", file=sys.stderr)
    del tensor
"""


def test_shared_tensor_that_outlives_its_producer_is_reported(device: Any, tmp_path: Path) -> None:
    # torch warns if a variable still holds it.
    programs = [SHARING.format(end=end) for end in (EARLY, "consumer.join(); del tensor")]
    assert_reported(device, tmp_path, "cuda-ipc", programs)


GROUP = """
import faulthandler, os, sys, tempfile
faulthandler.dump_traceback_later({limit_s} - 3, exit=True)  # It shows which call hangs.
import torch, torch.distributed as dist
device.make_context()
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group(
        device.backend, init_method=f"file://{{folder}}/store", rank=0, world_size=1
    )
    values = torch.ones(4, device=device.torch_name)
    dist.all_reduce(values)
    assert values.tolist() == [1, 1, 1, 1]
    {end}
faulthandler.cancel_dump_traceback_later()
"""
# A machine may have no interface but the loopback. The other settings switch off what one process
# on one GPU does not need and what may wait for hardware or a network.
NCCL = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}


def test_process_group_that_was_not_destroyed_is_reported(device: Any, tmp_path: Path) -> None:
    if not torch.distributed.is_backend_available(device.backend):
        raise SkipTest(f"this torch has no {device.backend}")
    ends = ("", "dist.destroy_process_group()")
    programs = [GROUP.format(end=end, limit_s=device.limit_s) for end in ends]
    assert_reported(device, tmp_path, "process-group-not-destroyed", programs, **NCCL)
