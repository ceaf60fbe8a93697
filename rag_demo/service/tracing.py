"""Spans of OpenTelemetry, if its API is installed; the caller's ``traceparent`` is the parent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]


@contextlib.contextmanager
def span(headers: dict[bytes, bytes]) -> Iterator[dict[str, Any]]:
    """Trace a request.

    Args:
        headers: Headers of the request.

    Yields:
        A mapping for the attributes of the span, which is named after ``http.route``.
    """
    attributes: dict[str, Any] = {}
    if trace is None:
        yield attributes
        return
    carrier = {
        name: headers[name.encode()].decode("latin-1")
        for name in ("traceparent", "tracestate")
        if name.encode() in headers
    }
    tracer = trace.get_tracer("rag_demo.service")
    context = propagate.extract(carrier)
    with tracer.start_as_current_span("request", context, trace.SpanKind.SERVER) as current:
        yield attributes
        current.update_name(f"{attributes['http.request.method']} {attributes['http.route']}")
        current.set_attributes(attributes)
        if attributes["http.response.status_code"] >= 500:
            current.set_status(trace.StatusCode.ERROR)
