"""Metrics of requests and batches; `torch_utils.prometheus` has those of models and memory."""

from __future__ import annotations

import prometheus_client as client

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)

REQUESTS = client.Counter("rag_demo_requests", "Requests.", ["route", "method", "status"])
SECONDS = client.Histogram(
    "rag_demo_request_duration_seconds", "Time to answer a request.", ["route"], buckets=_BUCKETS
)
IN_FLIGHT = client.Gauge("rag_demo_requests_in_flight", "Requests under way.")
QUEUE_SECONDS = client.Histogram(
    "rag_demo_queue_seconds", "Time that a job waits in the queue.", ["lane"], buckets=_BUCKETS
)
INFERENCE_SECONDS = client.Histogram(
    "rag_demo_inference_seconds", "Time of a batch.", ["lane"], buckets=_BUCKETS
)
TOKENS = client.Counter("rag_demo_tokens", "Tokens of embedded and reranked texts.")
TRUNCATED = client.Counter("rag_demo_truncated_texts", "Texts of which the end was cut off.")
BATCH = client.Histogram(
    "rag_demo_batch_tokens", "Estimated tokens of a batch.", ["lane"], buckets=_TOKENS
)
WAITING = client.Gauge("rag_demo_waiting_tokens", "Estimated tokens in the queue.", ["lane"])
REFUSED = client.Counter("rag_demo_refused", "Requests refused with 429.")
DOCUMENTS = client.Gauge("rag_demo_documents", "Documents in the index.")
INDEX_VERSION = client.Gauge("rag_demo_index_version", "The version in use.", ["version"])
