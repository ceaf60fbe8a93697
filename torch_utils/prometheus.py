"""What a service's models and memory do, as metrics for Prometheus.

::

    from torch_utils.prometheus import asgi_app

    app.mount("/metrics", asgi_app())

Needs the package prometheus-client (the extra ``service``). With several workers, set
``PROMETHEUS_MULTIPROC_DIR`` to an empty folder before they start, as that package says: every
metric here says how the workers' values are put together. What prometheus-client exports itself
(the process's memory and time) is not exported again.
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
    """Return an ASGI application that serves the metrics of this process, or of all workers.

    Calls `register`. With ``PROMETHEUS_MULTIPROC_DIR`` it puts the workers' metrics together,
    and drops the gauges of workers that have ended, however they ended.
    """
    register()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.make_asgi_app(registry_to_expose())(scope, receive, send)

    return app


def registry_to_expose() -> client.CollectorRegistry:
    """Return this process's registry, or one of all workers, for a route of your own."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return client.REGISTRY
    from prometheus_client import multiprocess

    _METRICS.count()
    for path in Path(folder).glob("gauge_live*_*.db"):
        pid = path.stem.rpartition("_")[2]
        if pid.isdecimal() and not _is_running(int(pid)):
            with contextlib.suppress(FileNotFoundError):  # Another worker was faster.
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
    """Export what torch_utils does from here on. Registering again changes nothing.

    Releases, loads and unloads of every `ModelHost`, and retries of `find_batch_size` are counted.
    Hosts, devices in use and open resources are looked at when metrics are collected and whenever
    something is counted. A daemon thread counts, because prometheus-client has locks that a
    destructor must not wait for: a metric may lag behind by a moment, except in an exposition of
    this process. No device context is created, and torch is not imported.

    A forked child goes on with its parent's counts, as prometheus-client's metrics do, and in
    multiprocess mode with counts of its own.

    Args:
        registry: Where to register; by default `prometheus_client.REGISTRY`.

    Raises:
        ValueError: The registry has other metrics of these names.
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
    """All the metrics, which are the same in every registry."""

    def __init__(self) -> None:
        self._types: set[str] = set()  # that have been open: each is 0 afterwards, not missing
        self._models: set[str] = set()  # the same
        self._held_on = {"host"}
        self._begin()
        self._all: list[Any] = []
        gauge, counter, histogram = client.Gauge, client.Counter, client.Histogram
        new = self._new
        self.loaded = new(gauge, "model_loaded", "Whether a model is loaded.", "model")
        self.leases = new(gauge, "model_leases", "Leases of a model at the moment.", "model")
        self.loads = new(
            counter, "model_loads", "Loads of a model, by outcome.", "model", "outcome"
        )
        self.unloads = new(
            counter, "model_unloads", "Unloads of a model, by reason.", "model", "reason"
        )
        self.load_s = new(histogram, "model_load_duration_seconds", "How long loads took.", "model")
        self.release_s = new(histogram, "release_duration_seconds", "How long releases took.")
        self.released = new(
            counter, "released_bytes", "Bytes of storages that releases freed.", "device"
        )
        held = "Bytes that the last release gave up and something still refers to."
        self.held = new(gauge, "still_held_bytes", held, "device")
        memory = "Memory of a device in use: of this process, or free and total on the device."
        self.memory = new(
            gauge, "device_memory_bytes", memory, "device", "kind", multiprocess_mode="liveall"
        )
        self.open = new(gauge, "open_resources", "Resources that are open.", "type")
        retries = "Calls that were tried again with a smaller batch."
        self.retries = new(counter, "out_of_memory_retries", retries)

    def _new(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        if kind is client.Gauge:
            options = {"multiprocess_mode": "livesum", **options}
        elif kind is client.Histogram:
            options = {"buckets": _SECONDS}
        self._all.append(kind(f"torch_utils_{name}", text, labels, registry=None, **options))
        return self._all[-1]

    def describe(self) -> Iterator[Any]:
        """Return the names, for the registry to see that nobody else has them."""
        for metric in self._all:
            yield from metric.describe()

    def _begin(self) -> None:
        # A destructor may put something into it while its thread holds any lock.
        self._events: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen to events, and count them in a thread."""
        if self._listen not in LISTENERS:
            LISTENERS.append(self._listen)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="torch_utils-metrics", daemon=True
            )
            self._thread.start()

    def start_over_in_child(self) -> None:
        """In a forked child: the thread is gone, and its lock may be held."""
        self._begin()
        if self._listen in LISTENERS:
            self.start()

    def _listen(self, event: str, values: dict[str, Any]) -> None:
        if event != "leases" or _HAS_WORKERS:
            self._events.put((event, values))

    def _run(self) -> None:
        events = self._events
        while True:
            event = events.get()
            try:
                self.count(event)
            except Exception as error:  # A folder that was removed: the thread counts on.
                log(ERROR, "metrics cannot be written: %r", error)

    def collect(self) -> Iterator[Any]:
        """Return everything as it is now."""
        self.count()
        for metric in self._all:
            yield from metric.collect()

    def count(self, *events: tuple[str, dict[str, Any]]) -> None:
        """Count events and all that wait, and look at the state of everything."""
        with self._counting:
            waiting = list(events)
            with contextlib.suppress(Empty):
                while True:
                    waiting.append(self._events.get_nowait())
            for event, values in waiting:
                if "model" in values:
                    values["model"] = _label(values["model"])
                getattr(self, f"_count_{event}")(**values)
            self._look()

    def _look(self) -> None:
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
        """Do nothing: `_look` reads the leases."""

    def _count_retry(self) -> None:
        self.retries.inc()


def _label(text: str) -> str:
    """Return a label's value: one that UTF-8 does not have would be the end of all labels."""
    return text.encode("utf-8", "backslashreplace").decode()


_METRICS = _Metrics()
_REGISTERED: WeakSet[client.CollectorRegistry] = WeakSet()
os.register_at_fork(after_in_child=_METRICS.start_over_in_child)
