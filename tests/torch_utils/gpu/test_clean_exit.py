"""clean-exit finds remaining processes, shared tensors and process groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

from clean_exit import ExitReport, check
from tests.support.programs import IMPORT_PATH

MB = 1 << 20


def checked(
    device: Any, folder: Path, program: str, *, limit_s: float = 600, **env: str
) -> ExitReport:
    """Check a program in a file, which spawned processes can import."""
    path = folder / "program.py"
    path.write_text(device.source(program))
    paths = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(path)]
    environment = {**os.environ, "PYTHONPATH": paths, **env}
    report = check(command, timeout_s=limit_s, max_shutdown_s=limit_s, env=environment)
    # Every control would be clean if its program failed.
    assert report.returncode == 0, f"{report}\n{report.stdout}\n{report.stderr}"
    return report


def ids(report: ExitReport) -> set[str]:
    return {finding.id for finding in report.findings}


CHILD = """
import subprocess, sys, os
child = subprocess.Popen(
    [sys.executable, "-c", '''
import sys, time
from {module} import {kind}
device = {kind}()
device.make_context()
print("ready", flush=True)
time.sleep(600)
'''],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
)
assert child.stdout.readline() == b"ready\\n"
{end}
"""


def with_child(device: Any, end: str) -> str:
    """Return a program with a child that has a context, and the given last lines."""
    return CHILD.format(module=type(device).__module__, kind=type(device).__name__, end=end)


def test_remaining_child_is_reported(device: Any, tmp_path: Path) -> None:
    end = "child.returncode = 0  # The child outlives the program."
    report = checked(device, tmp_path, with_child(device, end))
    assert "orphan-process" in ids(report), str(report)
    end = "child.kill(); child.wait(); child.stdout.close()"
    report = checked(device, tmp_path, with_child(device, end))
    assert report.clean, str(report)


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
    report = checked(device, tmp_path, SHARING.format(end=EARLY))
    assert "cuda-ipc" in ids(report), str(report)
    end = "consumer.join(); del tensor"  # torch warns if a variable still holds it.
    report = checked(device, tmp_path, SHARING.format(end=end))
    assert report.clean, str(report)


GROUP = """
import faulthandler, os, sys, tempfile
faulthandler.dump_traceback_later({limit_s} - 3, exit=True)  # It shows which call hangs.
import torch, torch.distributed as dist
device.make_context()
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group(
        device.process_group(), init_method=f"file://{{folder}}/store", rank=0, world_size=1
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
    import torch.distributed

    backend = device.process_group()
    if not getattr(torch.distributed, f"is_{backend}_available")():
        raise SkipTest(f"this torch has no {backend}")
    limit_s = 20 if device.name == "cuda" else 600  # A machine with a GPU is lent for minutes.
    for end, is_clean in (("", False), ("dist.destroy_process_group()", True)):
        program = GROUP.format(end=end, limit_s=limit_s)
        report = checked(device, tmp_path, program, limit_s=limit_s, **NCCL)
        assert ("process-group-not-destroyed" not in ids(report)) == is_clean, str(report)
        assert report.clean or not is_clean, str(report)
