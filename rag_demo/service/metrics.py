"""Metrics of requests and batches; `torch_utils.prometheus` has those of models and memory."""

from __future__ import annotations

import os
from pathlib import Path

import prometheus_client as client
from prometheus_client.multiprocess import MultiProcessCollector

from rag_demo.service.problems import Problem
from torch_utils.prometheus import register

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0)

REQUESTS = client.Counter("rag_demo_requests", "Requests.", ["route", "method", "status"])
SECONDS = client.Histogram(
    "rag_demo_request_duration_seconds", "Time to answer a request.", ["route"], buckets=_BUCKETS
)
IN_FLIGHT = client.Gauge(
    "rag_demo_requests_in_flight", "Requests under way.", multiprocess_mode="livesum"
)
QUEUE_SECONDS = client.Histogram(
    "rag_demo_queue_seconds", "Time that a job waits in the queue.", buckets=_BUCKETS
)
INFERENCE_SECONDS = client.Histogram(
    "rag_demo_inference_seconds", "Time of a batch in the model and the index.", buckets=_BUCKETS
)
TOKENS = client.Counter("rag_demo_tokens", "Tokens of embedded texts, for requests with usage.")
BATCH = client.Histogram(
    "rag_demo_batch_texts", "Texts in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
WAITING = client.Gauge("rag_demo_waiting_texts", "Texts in the queue.", multiprocess_mode="livesum")
REFUSED = client.Counter("rag_demo_refused", "Requests refused with 429.")
IDLE_CLOSED = client.Counter("rag_demo_silent_connections", "Idle connections that were closed.")


def exposition() -> tuple[str, bytes]:
    """Return the media type and the text of the metrics.

    Those of requests and batches cover all workers, those of models and memory only this process.

    Raises:
        Problem: The files with the workers' metrics are missing.
    """
    registry, folder = client.REGISTRY, os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder:
        if not any(Path(folder).glob(f"*_{os.getpid()}.db")):
            raise Problem(503, "the files with the metrics were removed; restart the service")
        registry = client.CollectorRegistry()
        register(registry)
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return client.CONTENT_TYPE_LATEST, client.generate_latest(registry)
