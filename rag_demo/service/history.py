"""The memory of the last minutes, with the loads and unloads in it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from rag_demo.service.engine import Engine
from torch_utils import memory_snapshot

__all__ = ["History"]

_SAMPLES = 300
_EVENTS = 50


class History:
    """Samples of the memory and events, oldest first."""

    def __init__(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._counts: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # by host

    def add_event(self, what: str, model: str) -> None:
        """Note an event that happens now."""
        self.events.append({"at": round(time.time(), 3), "what": what, "model": model})

    def sample(self, engine: Engine) -> dict[str, Any]:
        """Return the memory now; note the loads and unloads since the last sample."""
        models, elsewhere = {}, 0
        for name, host in engine.hosts.items():
            status = host.status()
            loads, unloads = self._counts.get(host, (0, 0))
            if status.loads > loads:
                self.add_event("load", name)
            if status.unloads > unloads:
                self.add_event("unload", name)
            self._counts[host] = status.loads, status.unloads
            models[name] = status.state
            if host.isolation == "process":
                elsewhere += status.nbytes
        now = memory_snapshot()
        devices = {name: memory.reserved_bytes for name, memory in now.devices.items()}
        at, host_bytes = round(time.time(), 3), now.host.rss_bytes + elsewhere
        return {"at": at, "host": host_bytes, "devices": devices, "models": models}
