"""What the driver says about processes and the card, without a context of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest


def files_of(pid: int) -> list[str]:
    """List the files of CUDA's driver that a process has open; NVML opens others.

    Lists only what CUDA itself needs: every process that called cuInit has these.
    """
    found = []
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # It has ended, or is another user's.
        return []
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if Path(target.removesuffix(" (deleted)")).name == "nvidia-uvm":
            found.append(target)
    return found


def processes() -> set[int]:
    """Return the processes that have a context on some card, as far as NVML tells."""

    def ask(nvml: Any) -> set[int]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        lists = [nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
        return {process.pid for found in lists for process in found}

    return _asked(ask)


def used_bytes() -> int:
    """Return what all processes use of the first card."""
    return _asked(
        lambda nvml: nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used
    )


def _asked(question: Callable[[Any], Any]) -> Any:
    try:
        import pynvml
    except ImportError:
        raise SkipTest("needs NVML through pynvml, the package nvidia-ml-py") from None
    pynvml.nvmlInit()
    try:
        return question(pynvml)
    finally:
        pynvml.nvmlShutdown()
