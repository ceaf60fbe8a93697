"""What the service counts itself; models and memory are counted by `torch_utils.prometheus`."""

from __future__ import annotations

import os
from pathlib import Path

import prometheus_client as client

from rag_demo.service.problems import Problem

__all__ = ["BATCH", "CONNECTIONS", "REFUSED", "REQUESTS", "SECONDS", "WAITING", "exposition"]

REQUESTS = client.Counter(
    "rag_demo_requests", "Requests, by the route's pattern.", ["route", "method", "status"]
)
SECONDS = client.Histogram(
    "rag_demo_request_duration_seconds", "From a request's head to its answer's end.", ["route"]
)
BATCH = client.Histogram(
    "rag_demo_batch_texts",
    "Texts that were embedded together.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
WAITING = client.Gauge(
    "rag_demo_waiting_texts", "Texts that wait for a batch.", multiprocess_mode="livesum"
)
REFUSED = client.Counter("rag_demo_refused", "Requests refused because too many waited.")
CONNECTIONS = client.Counter("rag_demo_silent_connections", "Connections closed for their silence.")


def exposition() -> tuple[str, bytes]:
    """Write all metrics of this process, or of all workers.

    Returns:
        Their media type, and the text.

    Raises:
        Problem: The files of several workers have been removed. This one writes on to those that
            it has open, which nobody can read.
    """
    registry = client.REGISTRY
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        if not any(Path(folder).glob(f"*_{os.getpid()}.db")):
            raise Problem(
                503, "the files with the metrics were removed; start the service again to count"
            )
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = client.CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return client.CONTENT_TYPE_LATEST, client.generate_latest(registry)
