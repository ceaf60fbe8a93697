"""Metrics of a process's models and memory for Prometheus.

::

    from torch_utils.prometheus import asgi_app

    app.mount("/metrics", asgi_app())

This module needs the package prometheus-client (the extra ``service``), which itself exports the
process's memory and time. Each process exports its own metrics and must be scraped by itself.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import prometheus_client as client
from prometheus_client import metrics_core

from torch_utils._memory import memory_snapshot
from torch_utils._registry import REGISTRY
from torch_utils._report import CleanupReport
from torch_utils._runtime import LISTENERS
from torch_utils.hosting.host import HOSTS

__all__ = ["asgi_app", "register"]

_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTER = metrics_core.CounterMetricFamily
_GAUGE = metrics_core.GaugeMetricFamily
_HISTOGRAM = metrics_core.HistogramMetricFamily
_FAMILIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "model_loads": (_COUNTER, "Loads of a model, by outcome.", ("model", "outcome")),
    "model_unloads": (_COUNTER, "Unloads of a model, by reason.", ("model", "reason")),
    "model_load_duration_seconds": (_HISTOGRAM, "Duration of loads.", ("model",)),
    "model_loaded": (_GAUGE, "Whether a model is loaded.", ("model",)),
    "model_asleep": (_GAUGE, "Whether a model sleeps in host memory.", ("model",)),
    "model_bytes": (_GAUGE, "Memory of a loaded or sleeping model.", ("model", "device")),
    "model_leases": (_GAUGE, "Open leases of a model.", ("model",)),
    "release_duration_seconds": (_HISTOGRAM, "Duration of releases.", ()),
    "released_bytes": (_COUNTER, "Bytes that releases freed.", ("device",)),
    "still_held_bytes": (_GAUGE, "Bytes that the last release could not free.", ("device",)),
    "device_memory_bytes": (_GAUGE, "Memory of each device in use.", ("device", "kind")),
    "open_resources": (_GAUGE, "Open resources.", ("type",)),
    "out_of_memory_retries": (_COUNTER, "Calls repeated with a smaller batch size.", ()),
}
"""The type, help text and labels of each metric, by its name without ``torch_utils_``."""


def asgi_app() -> Callable[..., Any]:
    """Return an ASGI application that serves the metrics of this process. Calls `register`."""
    register()
    app: Callable[..., Any] = client.make_asgi_app()
    return app


def register(registry: client.CollectorRegistry | None = None) -> None:
    """Export metrics of this process from now on. Idempotent.

    Counts releases, loads and unloads of each `ModelHost`, and retries of `find_batch_size`. The
    states of hosts, devices in use and open resources are read at each scrape. Creates no device
    context and does not import torch. A forked child continues its parent's counts.

    Args:
        registry: The registry; `prometheus_client.REGISTRY` by default.

    Raises:
        ValueError: The default registry has other metrics with these names. Other registries may
            not check it.
    """
    target = client.REGISTRY if registry is None else registry
    if target not in _REGISTERED:
        target.register(_METRICS)
        _REGISTERED.add(target)
    if _METRICS.listen not in LISTENERS:
        LISTENERS.append(_METRICS.listen)


class _Durations:
    """A histogram of durations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(_SECONDS, duration_s)] += 1
        self._sum_s += duration_s

    def exposed(self) -> tuple[list[tuple[str, float]], float]:
        bounds = [*map(str, _SECONDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum_s


class _Metrics:
    """Plain counters, and the collector that exposes them."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._lock = threading.Lock()
        # By metric, and by the tuple of the labels' values.
        self._counts: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._counts["out_of_memory_retries"][()] = 0
        self._load_s: defaultdict[tuple[str, ...], _Durations] = defaultdict(_Durations)
        self._release_s = _Durations()

    def listen(self, event: str, values: dict[str, Any]) -> None:
        """Count an event, now or with the next one.

        A destructor may cause an event while its thread holds the lock, so this never waits.
        """
        self._events.append((event, values))
        if self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def _count(self) -> None:
        counts = self._counts
        while self._events:
            event, values = self._events.popleft()
            if event == "load":
                counts["model_loads"][values["model"], values["outcome"]] += 1
                self._load_s[(values["model"],)].observe(values["duration_s"])
            elif event == "unload":
                counts["model_unloads"][values["model"], values["reason"]] += 1
            elif event == "retry":
                counts["out_of_memory_retries"][()] += 1
            elif event == "release":
                report: CleanupReport = values["report"]
                self._release_s.observe(report.duration_s)
                counts["released_bytes"].update({(d,): n for d, n in report.freed_bytes.items()})
                known = [("host",), *counts["released_bytes"], *counts["still_held_bytes"]]
                held = Counter(dict.fromkeys(known, 0))
                for one in report.still_held:
                    held[(one.device,)] += one.nbytes
                counts["still_held_bytes"] = held

    def collect(self) -> Iterable[metrics_core.Metric]:
        """Return all metrics with their current values."""
        states: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        for device, memory in memory_snapshot().devices.items():
            for name, nbytes in vars(memory).items():
                states["device_memory_bytes"][device, name.removesuffix("_bytes")] = nbytes
        for entry in REGISTRY.open_entries():
            states["open_resources"][(entry.name,)] += entry.pid == os.getpid()
        for status in [host.status() for ref in HOSTS.valuerefs() if (host := ref())]:
            states["model_loaded"][(status.name,)] += status.state == "loaded"
            states["model_asleep"][(status.name,)] += status.state == "asleep"
            states["model_leases"][(status.name,)] += status.leases
            for device, nbytes in status.nbytes_by_device.items():
                states["model_bytes"][status.name, device] += nbytes
        with self._lock:
            self._count()
            values: dict[str, Any] = {**self._counts, **states}
            values["model_load_duration_seconds"] = self._load_s
            values["release_duration_seconds"] = {(): self._release_s}
            return [_family(name, values.get(name, {})) for name in _FAMILIES]

    def renew_lock(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = threading.Lock()


def _family(name: str, values: dict[tuple[str, ...], Any]) -> metrics_core.Metric:
    kind, text, labels = _FAMILIES[name]
    family = kind(f"torch_utils_{name}", text, labels=labels)
    for key, value in values.items():
        # A label that UTF-8 cannot encode would break the whole exposition.
        names = [label.encode("utf-8", "backslashreplace").decode() for label in key]
        family.add_metric(names, *(value.exposed() if kind is _HISTOGRAM else (float(value),)))
    return family  # type: ignore[no-any-return]


_METRICS = _Metrics()
_REGISTERED: WeakSet[client.CollectorRegistry] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_METRICS.renew_lock)
