"""What a service's models and memory do, as metrics for Prometheus.

::

    from torch_utils.prometheus import register

    register()  # once, in each process; then serve prometheus_client's exposition as usual

Needs the package prometheus-client (the extra ``service``). With several workers, set
``PROMETHEUS_MULTIPROC_DIR`` as that package says: every metric here says how the workers' values
are put together. What prometheus-client exports itself (the process's memory and time) is not
exported again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch_utils._events import LISTENERS
from torch_utils._registry import REGISTRY
from torch_utils.memory import memory_snapshot
from torch_utils.report import CleanupReport

try:
    import prometheus_client as client
except ImportError:
    raise ImportError(
        "torch_utils.prometheus needs prometheus-client: pip install prometheus-client"
    ) from None

__all__ = ["register"]

_KINDS = ("allocated", "reserved", "free", "total")
_MOST_WAITING = 10_000
"""Events that may wait to be counted; more of them can only come out of destructors."""
_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def register(registry: client.CollectorRegistry | None = None) -> None:
    """Export what torch_utils does from here on. Registering again changes nothing.

    Counted are releases, the loads and unloads of every `ModelHost`, and the retries of
    `find_batch_size`; looked at are devices in use and what is open, when somebody asks and
    whenever something is counted. Nothing is counted in a destructor, which may run while
    prometheus-client holds its lock: such events wait for the next one, or for the next
    exposition. No device context is created, and torch is not imported.

    Safe from several threads. A forked child goes on with its parent's counts, as
    prometheus-client's metrics do, and in multiprocess mode with counts of its own.

    Args:
        registry: Where to register; by default `prometheus_client.REGISTRY`.

    Raises:
        ValueError: The registry has other metrics of these names.
    """
    with _LOCK:
        target = client.REGISTRY if registry is None else registry
        if not _METRICS:
            _METRICS.append(_Metrics())
        if target not in _REGISTERED:
            target.register(_METRICS[0])
            _REGISTERED.add(target)
        if _METRICS[0].listen not in LISTENERS:
            LISTENERS.append(_METRICS[0].listen)


class _Metrics:
    """All the metrics, which are the same in every registry."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._counting = threading.Lock()
        self._types: set[str] = set()  # that have been open: each is 0 afterwards, not missing
        self._held_on = {"host"}
        self._loaded = Tally[tuple[int, str]]()
        self._leases: dict[tuple[int, str], dict[int, int]] = {}
        model, device = ["model"], ["device"]
        self.loaded = _gauge("model_loaded", "Whether a model is loaded.", model, "livesum")
        self.leases = _gauge("model_leases", "Leases of a model at the moment.", model, "livesum")
        self.loads = _counter("model_loads", "Loads of a model, by outcome.", [*model, "outcome"])
        self.unloads = _counter(
            "model_unloads", "Unloads of a model, by reason.", [*model, "reason"]
        )
        self.load_s = _histogram("model_load_duration_seconds", "How long loads took.", model)
        self.release_s = _histogram("release_duration_seconds", "How long releases took.", [])
        self.released = _counter("released_bytes", "Bytes of storages that releases freed.", device)
        self.held = _gauge(
            "still_held_bytes",
            "Bytes that the last release gave up and something still refers to.",
            device,
            "livesum",
        )
        self.memory = _gauge(
            "device_memory_bytes",
            "Memory of a device in use: of this process, or free and total on the device.",
            [*device, "kind"],
            "liveall",
        )
        self.open = _gauge("open_resources", "Resources that are open.", ["type"], "livesum")
        self.retries = _counter(
            "out_of_memory_retries", "Calls that were tried again with a smaller batch.", []
        )
        self._all = (
            self.loaded,
            self.leases,
            self.loads,
            self.unloads,
            self.load_s,
            self.release_s,
            self.released,
            self.held,
            self.memory,
            self.open,
            self.retries,
        )

    def describe(self) -> Iterator[Any]:
        """Return the names, for the registry to see that nobody else has them."""
        for metric in self._all:
            yield from metric.describe()

    def collect(self) -> Iterator[Any]:
        """Return everything as it is now."""
        self._count()
        for metric in self._all:
            yield from metric.collect()

    def listen(self, event: str, values: dict[str, Any]) -> None:
        """Take an event; count it now unless that could wait for a lock of this very thread."""
        self._waiting.append((event, values))
        if not _is_in_a_destructor():
            self._count()

    def _count(self) -> None:
        while self._counting.acquire(blocking=False):  # Or whoever is at it takes these as well.
            try:
                looks = not self._waiting
                while self._waiting:
                    event, values = self._waiting.popleft()
                    if "model" in values:  # One that UTF-8 has not would be the end of all labels.
                        text = values["model"].encode("utf-8", "backslashreplace")
                        values = {**values, "model": text.decode()}
                    getattr(self, f"_count_{event}")(**values)
                    looks |= event != "leases"  # Which come often, and change nothing else.
                if looks:
                    self._look()
            finally:
                self._counting.release()
            if not self._waiting:
                return

    def _look(self) -> None:
        """Set what is looked at, rather than counted."""
        for name, memory in memory_snapshot().devices.items():
            for kind in _KINDS:
                self.memory.labels(name, kind).set(getattr(memory, f"{kind}_bytes"))
        pid = os.getpid()
        tally = Tally(entry.name for entry in REGISTRY.open_entries() if entry.pid == pid)
        self._types.update(tally)
        for name in self._types:
            self.open.labels(name).set(tally[name])

    def _count_release(self, *, report: CleanupReport) -> None:
        self.release_s.observe(report.duration_s)
        for device, nbytes in report.freed_bytes.items():
            self.released.labels(device).inc(nbytes)
        held_bytes = Tally[str]()
        for held in report.still_held:
            held_bytes[held.device] += held.nbytes
        self._held_on.update(held_bytes, report.freed_bytes)
        for device in self._held_on:
            self.held.labels(device).set(held_bytes[device])

    def _count_load(self, *, model: str, outcome: str, duration_s: float) -> None:
        self.loads.labels(model, outcome).inc()
        self.load_s.labels(model).observe(duration_s)
        self._count_loaded(model, outcome == "success")

    def _count_unload(self, *, model: str, reason: str) -> None:
        self.unloads.labels(model, reason).inc()
        self._count_loaded(model, -1)

    def _count_loaded(self, model: str, change: int) -> None:
        """Several hosts may have one name: a new one is loaded before an old one is given back."""
        key = os.getpid(), model  # What a fork's parent has loaded is not there.
        self._loaded[key] = max(0, self._loaded[key] + change)
        self.loaded.labels(model).set(self._loaded[key])

    def _count_leases(self, *, model: str, host: int, leases: int) -> None:
        of_hosts = self._leases.setdefault((os.getpid(), model), {})
        of_hosts[host] = leases
        self.leases.labels(model).set(sum(of_hosts.values()))
        if not leases:
            del of_hosts[host]

    def _count_retry(self) -> None:
        self.retries.inc()


def _counter(name: str, help_: str, labels: list[str]) -> client.Counter:
    return client.Counter(f"torch_utils_{name}", help_, labels, registry=None)


def _gauge(name: str, help_: str, labels: list[str], mode: Any) -> client.Gauge:
    full = f"torch_utils_{name}"
    return client.Gauge(full, help_, labels, multiprocess_mode=mode, registry=None)


def _histogram(name: str, help_: str, labels: list[str]) -> client.Histogram:
    return client.Histogram(f"torch_utils_{name}", help_, labels, buckets=_SECONDS, registry=None)


def _is_in_a_destructor() -> bool:
    """Whether this thread may be in the middle of anything, prometheus-client's lock in hand."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or frame.f_globals.get("__name__") in _FROM_FINALIZERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_FROM_FINALIZERS = frozenset({"weakref", "prometheus_client.metrics", "prometheus_client.values"})
_LOCK = threading.Lock()
_METRICS: list[_Metrics] = []
_REGISTERED: WeakSet[client.CollectorRegistry] = WeakSet()
