"""A loaded model, in this process or in its own, and how it is given back."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

from torch_utils.hosting.process import ModelProcess
from torch_utils.memory import memory_snapshot
from torch_utils.releasing.run import release, storage_bytes
from torch_utils.report import CleanupReport
from torch_utils.resource import Resource, closes_on_error

__all__ = ["ProcessTenant", "Tenant", "ThreadTenant"]


class Tenant(Resource):
    """A loaded model; closing it gives the model back, once.

    Its host closes it, at exit too, after it has waited for leases.

    Attributes:
        added_bytes: What it takes, by "host" and device.
        is_measured: Whether that is the model's alone, so that its next load will take as much.
    """

    close_at_exit = False
    model: Any = None
    added_bytes: Mapping[str, int] = {}
    is_measured = True
    report = CleanupReport()

    def is_alive(self) -> bool:
        """Say whether it can still be lent."""
        return True

    def _release(self) -> None:
        raise NotImplementedError


class ThreadTenant(Tenant):
    """A model in this process.

    Args:
        name: What errors call it.
        load: Makes it.
    """

    @closes_on_error
    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        before, imported = memory_snapshot(), len(sys.modules)
        self.model = load()
        if self.model is None:
            raise TypeError(f"what loads {name} returned None; it has to return the model")
        if isinstance(self.model, CoroutineType):
            self.model.close()
            raise TypeError(f"what loads {name} is async; it has to be an ordinary function")
        added = memory_snapshot() - before
        seen = {device: memory.reserved_bytes for device, memory in added.devices.items()}
        seen["host"] = added.host.rss_bytes
        own = storage_bytes(self.model)
        if len(sys.modules) > imported:  # Modules are no model, and stay when it goes.
            self.is_measured = bool(own)
            if own:
                seen["host"] = 0
        # Not less than its own tensors: others may have given memory back meanwhile.
        places = {**seen, **own}
        self.added_bytes = {place: max(seen.get(place, 0), own.get(place, 0)) for place in places}

    def _release(self) -> None:
        model, self.model = self.model, None
        if model is None:
            return
        try:
            self.report = release(model)
        except TypeError:  # A kind that `release` does not know: it goes with its last reference.
            del model
            gc.collect()
            self.report = release()


class ProcessTenant(Tenant):
    """A model in a process of its own.

    Args:
        name: What errors call it.
        load: What makes it, pickled.
    """

    process: ModelProcess | None = None

    @closes_on_error
    def __init__(self, name: str, load: bytes) -> None:
        self.process = ModelProcess(load, name=name)
        self.process.wait_until_loaded()
        self.model = self.process
        self.added_bytes = self.process.added_bytes

    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self.process is not None and self.process.is_alive()

    def _release(self) -> None:
        if self.process is not None:
            before, started = memory_snapshot(), time.monotonic()
            held = {**self.added_bytes, "host": _resident_bytes(self.process.pid)}
            self.process.end()
            self.report = CleanupReport(
                freed_bytes=held,
                duration_s=time.monotonic() - started,
                before=before,
                after=memory_snapshot(),
            )


def _resident_bytes(pid: int) -> int:
    """Read the memory of a process that no other has as well; 0 where the system does not tell."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
