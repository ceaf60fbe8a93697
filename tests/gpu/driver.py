"""Query the driver about processes and the card, without a context of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest


def files_of(pid: int) -> list[str]:
    """List the files that every process which called cuInit has open; NVML opens others."""
    found = []
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # It has ended, or belongs to another user.
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
    """Return the pids of the processes that have a context on a card, by NVML."""

    def read(nvml: Any) -> set[int]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        lists = [nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
        return {process.pid for found in lists for process in found}

    return _query(read)


def used_bytes() -> int:
    """Return the bytes that all processes use on the first card."""
    return _query(
        lambda nvml: nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used
    )


def _query(question: Callable[[Any], Any]) -> Any:
    try:
        import pynvml
    except ImportError:
        raise SkipTest("needs NVML through pynvml, the package nvidia-ml-py") from None
    pynvml.nvmlInit()
    try:
        return question(pynvml)
    finally:
        pynvml.nvmlShutdown()
