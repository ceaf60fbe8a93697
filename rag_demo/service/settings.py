"""Settings of a service and limits of its requests."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Limits", "Settings", "is_loopback"]


@dataclass(frozen=True)
class Limits:
    """Limits of requests: sizes, counts and times in seconds.

    Attributes:
        query_chars: Characters of one query, or of one text to embed or rerank.
        queries: Queries in one search request.
        texts: Texts in one request to embed, rerank or add.
        change_chars: Characters of all documents in one request to add.
        top_k: Results for one query.
        results: Results in one response, for all of its queries.
        where_depth: Nesting of mappings and lists in a filter.
        where_values: Values in a filter.
        body_bytes: Size of a request's body.
        all_bodies_bytes: Size of all bodies in memory; further requests get 429.
        answer_bytes: Size of a response; larger responses are replaced by 413.
        body_s: Time to send a body.
        header_s: Time that a connection may be idle before and between requests.
        answer_s: Time to answer a request, including the time in the queue.
        waiting_texts: Texts in the queue; further requests get 429.
        batch_texts: Texts that are embedded together; 1 turns batches off.
        connections: Open connections; beyond it the connection with the longest idle time is
            closed.
    """

    query_chars: int = 8_000
    queries: int = 256
    texts: int = 2_048
    change_chars: int = 200_000
    top_k: int = 1_000
    results: int = 10_000
    where_depth: int = 8
    where_values: int = 1_000
    body_bytes: int = 8 << 20
    all_bodies_bytes: int = 128 << 20
    answer_bytes: int = 64 << 20
    body_s: float = 15.0
    header_s: float = 15.0
    answer_s: float = 60.0
    waiting_texts: int = 4_096
    batch_texts: int = 64
    connections: int = 800


@dataclass(frozen=True)
class Settings:
    """Settings of a service. They can be pickled, for workers.

    Attributes:
        index: Folder of the saved index.
        model: Folder or name of the embedding model; None for the model of the index.
        device: A torch device such as "cuda:0"; None for the best device.
        retriever: Library that compares vectors.
        reranker: Folder or name of a cross-encoder; None for no reranking.
        trust_remote_code: Run code that comes with the models.
        keep_alive: How long an idle model stays loaded; see `torch_utils.ModelHost`.
        isolation: Whether the models run in this process or in processes of their own.
        call_timeout_s: Limit of one call of a model in a process of its own, in seconds; at most
            ``limits.answer_s``, which is the default.
        host: Address to listen on.
        port: Port to listen on; 0 for a free port.
        workers: Number of processes that serve.
        token: Bearer token that every client must send; None for no token.
        admin_token: Bearer token for administration and changes; None for ``token``.
        writable: Whether clients may change the index.
        cors_origins: Origins of pages that may call the service; ("*",) for all.
        drain_s: Seconds during which the service still accepts requests after a signal to stop.
        limits: Limits of requests.
    """

    index: Path
    model: str | None = None
    device: str | None = None
    retriever: Literal["torch", "faiss"] = "torch"
    reranker: str | None = None
    trust_remote_code: bool = False
    keep_alive: float | str = "5m"
    isolation: Literal["thread", "process"] = "thread"
    call_timeout_s: float | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    writable: bool = False
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 0.0
    limits: Limits = field(default_factory=Limits)


def is_loopback(host: str | None) -> bool:
    """Return whether an address or a host name is always the local machine."""
    if host is None:
        return False
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # A listener on :: reports 127.0.0.1 as ::ffff:127.0.0.1. Python 3.13 knows that as loopback.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
