"""Metrics of a service's models and memory for Prometheus.

::

    from torch_utils.prometheus import asgi_app

    app.mount("/metrics", asgi_app())

This module needs the package prometheus-client (the extra ``service``). With several workers, set
``PROMETHEUS_MULTIPROC_DIR`` to an empty folder before they start; each metric defines how the
workers' values are aggregated. prometheus-client itself exports the process's memory and time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from torch_utils._events import LISTENERS
from torch_utils._registry import REGISTRY
from torch_utils._runtime import ERROR, log
from torch_utils.hosting.host import HOSTS
from torch_utils.memory import memory_snapshot
from torch_utils.report import CleanupReport

try:
    import prometheus_client as client
except ImportError:
    raise ImportError(
        "torch_utils.prometheus needs prometheus-client: pip install prometheus-client"
    ) from None

__all__ = ["asgi_app", "register", "registry_to_expose"]

# Another worker may expose this process's gauges, so these must follow each lease. An exposition
# of this process reads the leases itself.
_HAS_WORKERS = "PROMETHEUS_MULTIPROC_DIR" in os.environ
_KINDS = ("allocated", "reserved", "free", "total")
_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def asgi_app() -> Callable[..., Any]:
    """Return an ASGI application that serves the metrics of this process or of all workers.

    Calls `register`. With ``PROMETHEUS_MULTIPROC_DIR`` it aggregates the workers' metrics without
    the gauges of workers that have ended.
    """
    register()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.make_asgi_app(registry_to_expose())(scope, receive, send)

    return app


def registry_to_expose() -> client.CollectorRegistry:
    """Return the registry of this process or of all workers, for an endpoint of your own."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return client.REGISTRY
    from prometheus_client import multiprocess

    _METRICS.count()
    for path in Path(folder).glob("gauge_live*_*.db"):
        pid = path.stem.rpartition("_")[2]
        if pid.isdecimal() and not _is_running(int(pid)):
            with contextlib.suppress(FileNotFoundError):  # Another worker has removed it.
                multiprocess.mark_process_dead(int(pid), folder)  # type: ignore[no-untyped-call]
    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # It runs as another user.
        return True
    return True


def register(registry: client.CollectorRegistry | None = None) -> None:
    """Export metrics of this process from now on. Idempotent.

    Counts releases, loads and unloads of each `ModelHost`, and retries of `find_batch_size`. The
    states of hosts, devices in use and open resources are read at each collection and each count.
    Creates no device context and does not import torch.

    A daemon thread counts, because destructors must not wait for prometheus-client's locks. So a
    metric may be late by a moment, except in an exposition of this process.

    A forked child continues its parent's counts; in multiprocess mode it starts new ones.

    Args:
        registry: The registry; `prometheus_client.REGISTRY` by default.

    Raises:
        ValueError: The registry has other metrics with these names.
    """
    target = client.REGISTRY if registry is None else registry
    if target not in _REGISTERED:
        _REGISTERED.add(target)
        try:
            target.register(_METRICS)
        except ValueError:
            _REGISTERED.discard(target)
            raise
    _METRICS.start()


class _Metrics:
    """All metrics, which are the same in every registry."""

    def __init__(self) -> None:
        self._types: set[str] = set()  # that were open: their value is 0 afterwards, not missing
        self._models: set[str] = set()  # likewise
        self._held_on = {"host"}
        self._begin()
        self._all: list[Any] = []
        gauge, counter, histogram = client.Gauge, client.Counter, client.Histogram
        new = self._new
        self.loaded = new(gauge, "model_loaded", "Whether a model is loaded.", "model")
        self.leases = new(gauge, "model_leases", "Open leases of a model.", "model")
        self.loads = new(
            counter, "model_loads", "Loads of a model, by outcome.", "model", "outcome"
        )
        self.unloads = new(
            counter, "model_unloads", "Unloads of a model, by reason.", "model", "reason"
        )
        self.load_s = new(histogram, "model_load_duration_seconds", "Duration of loads.", "model")
        self.release_s = new(histogram, "release_duration_seconds", "Duration of releases.")
        self.released = new(counter, "released_bytes", "Bytes that releases freed.", "device")
        held = "Bytes that the last release gave up but that are still referenced."
        self.held = new(gauge, "still_held_bytes", held, "device")
        memory = "Memory of a device in use: of this process, or free and total on the device."
        self.memory = new(
            gauge, "device_memory_bytes", memory, "device", "kind", multiprocess_mode="liveall"
        )
        self.open = new(gauge, "open_resources", "Open resources.", "type")
        retries = "Calls that were repeated with a smaller batch size."
        self.retries = new(counter, "out_of_memory_retries", retries)

    def _new(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        if kind is client.Gauge:
            options = {"multiprocess_mode": "livesum", **options}
        elif kind is client.Histogram:
            options = {"buckets": _SECONDS}
        self._all.append(kind(f"torch_utils_{name}", text, labels, registry=None, **options))
        return self._all[-1]

    def describe(self) -> Iterator[Any]:
        """Yield the metrics' descriptions, by which the registry finds duplicate names."""
        for metric in self._all:
            yield from metric.describe()

    def _begin(self) -> None:
        # A destructor may add an event while its thread holds any lock.
        self._events: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to listen to events, and the thread that counts them."""
        if self._listen not in LISTENERS:
            LISTENERS.append(self._listen)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="torch_utils-metrics", daemon=True
            )
            self._thread.start()

    def start_over_in_child(self) -> None:
        """In a forked child: start a new thread with a new lock, which the old thread may hold."""
        self._begin()
        if self._listen in LISTENERS:
            self.start()

    def _listen(self, event: str, values: dict[str, Any]) -> None:
        if event != "leases" or _HAS_WORKERS:
            self._events.put((event, values))
            self._wakes.put(None)

    def _run(self) -> None:
        wakes = self._wakes
        while True:
            wakes.get()
            try:
                self.count()
            except Exception as error:  # The folder may be gone; keep counting.
                log(ERROR, "metrics cannot be written: %r", error)

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their current values."""
        self.count()
        for metric in self._all:
            yield from metric.collect()

    def count(self) -> None:
        """Count all queued events, and read the current states."""
        with self._counting:
            waiting = []
            with contextlib.suppress(Empty):
                while True:
                    waiting.append(self._events.get_nowait())
            for event, values in waiting:
                if "model" in values:
                    values["model"] = _label(values["model"])
                getattr(self, f"_count_{event}")(**values)
            self._read_states()

    def _read_states(self) -> None:
        for name, memory in memory_snapshot().devices.items():
            for kind in _KINDS:
                self.memory.labels(name, kind).set(getattr(memory, f"{kind}_bytes"))
        pid = os.getpid()
        tally = Tally(entry.name for entry in REGISTRY.open_entries() if entry.pid == pid)
        self._types.update(tally)
        for name in self._types:
            self.open.labels(name).set(tally[name])
        loaded, leases = Tally[str](), Tally[str]()
        for reference in HOSTS.valuerefs():
            host = reference()
            if host is not None:
                name = _label(host.name)
                status = host.status()
                loaded[name] += status.state == "loaded"
                leases[name] += status.leases
        self._models.update(loaded)
        for name in self._models:
            self.loaded.labels(name).set(loaded[name])
            self.leases.labels(name).set(leases[name])

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

    def _count_unload(self, *, model: str, reason: str) -> None:
        self.unloads.labels(model, reason).inc()

    def _count_leases(self) -> None:
        """Do nothing: `_read_states` reads the leases."""

    def _count_retry(self) -> None:
        self.retries.inc()


def _label(text: str) -> str:
    """Return a valid label: one that UTF-8 cannot encode would break the whole exposition."""
    return text.encode("utf-8", "backslashreplace").decode()


_METRICS = _Metrics()
_REGISTERED: WeakSet[client.CollectorRegistry] = WeakSet()
os.register_at_fork(after_in_child=_METRICS.start_over_in_child)
