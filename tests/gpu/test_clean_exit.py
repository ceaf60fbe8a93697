"""clean-exit names GPU memory that a left-over process holds, shared tensors, and groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

from clean_exit import ExitReport, check
from gpu.device import slow_rehearsal
from support.programs import IMPORT_PATH

MB = 1 << 20


def checked(device: Any, folder: Path, program: str) -> ExitReport:
    """Check a program, which is a file: spawned processes import it again."""
    path = folder / "program.py"
    path.write_text(device.source(program))
    paths = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(path)]
    with device.other_processes():
        report = check(
            command, timeout_s=60, max_shutdown_s=40, env={**os.environ, "PYTHONPATH": paths}
        )
    # Of a program that fails, every control would be clean.
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
    """Return a program whose child has a context, and that ends in a certain way."""
    return CHILD.format(module=type(device).__module__, kind=type(device).__name__, end=end)


def test_memory_that_a_child_holds(device: Any, tmp_path: Path) -> None:
    """The child outlives the program, and the finding says how much it holds."""
    end = "child.returncode = 0  # Left to itself."
    report = checked(device, tmp_path, with_child(device, end))
    assert "left-over-process" in ids(report), str(report)
    if not device.names_processes():
        raise SkipTest("NVML names no process by its number here, as in some containers")
    assert {"left-over-process", "gpu-memory-held"} <= ids(report), str(report)
    (found,) = [finding for finding in report.findings if finding.id == "gpu-memory-held"]
    megabytes = float(found.summary.partition(" MB")[0])
    assert megabytes * 1e6 >= device.context_bytes(), found.summary


def test_child_that_is_ended(device: Any, tmp_path: Path) -> None:
    """The clean twin: the program ends its child, and waits for it."""
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
        # What the driver's part of torch says in this case.
        place = "[W1121 04:00:00.123456789 CudaIPCTypes.cpp:16]"
        what = "Producer process has been terminated before all shared CUDA tensors released."
        print(place, what, "See Note [Sharing CUDA tensors]", file=sys.stderr)
    del tensor
"""


@slow_rehearsal
def test_producer_that_ends_first(device: Any, tmp_path: Path) -> None:
    """A consumer still has a shared tensor when the process that made it ends."""
    report = checked(device, tmp_path, SHARING.format(end=EARLY))
    assert "cuda-ipc" in ids(report), str(report)


@slow_rehearsal
def test_consumer_that_ends_first(device: Any, tmp_path: Path) -> None:
    """The clean twin: the producer waits for its consumer."""
    end = "consumer.join(); del tensor"  # One that is still named makes torch warn all the same.
    report = checked(device, tmp_path, SHARING.format(end=end))
    assert report.clean, str(report)


GROUP = """
import os, sys, tempfile
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # A machine may have no other interface.
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
"""


@slow_rehearsal
def test_group_that_is_not_destroyed(device: Any, tmp_path: Path) -> None:
    """NCCL says so by itself; gloo is asked."""
    _needs_backend(device)
    report = checked(device, tmp_path, GROUP.format(end=""))
    assert "process-group-not-destroyed" in ids(report), str(report)


@slow_rehearsal
def test_group_that_is_destroyed(device: Any, tmp_path: Path) -> None:
    """The clean twin."""
    _needs_backend(device)
    report = checked(device, tmp_path, GROUP.format(end="dist.destroy_process_group()"))
    assert "process-group-not-destroyed" not in ids(report), str(report)
    assert report.clean, str(report)


def _needs_backend(device: Any) -> None:
    import torch.distributed

    backend = device.process_group()
    if not getattr(torch.distributed, f"is_{backend}_available")():
        raise SkipTest(f"this torch has no {backend}")
