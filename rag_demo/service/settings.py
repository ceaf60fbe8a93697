"""Settings: all that a service is told when it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Limits", "Settings", "is_loopback"]


@dataclass(frozen=True)
class Limits:
    """What one client may ask, and how long anybody may take.

    Attributes:
        query_chars: Of one query, or one text to embed.
        queries: In one request to search.
        texts: In one request to embed.
        top_k: Answers to one query.
        results: In one answer, over all of its queries.
        where_depth: Of a filter: how deep mappings and lists stand in each other.
        where_values: Of a filter: how many values it names.
        body_bytes: Of a request.
        all_bodies_bytes: Of all requests that are read or answered; more are told to come later.
        chunks: That a body may come in.
        body_s: A client may take to send its request's body.
        header_s: A connection may be silent before it has sent a whole request's head.
        send_s: A client may take to read what it is sent.
        answer_s: A request may wait and work, all together.
        waiting_texts: That wait to be embedded or searched for; more are answered with 429.
        batch_texts: That are embedded together; 1 for one request at a time.
        connections: At once; the one that has been silent the longest goes for a new one.
    """

    query_chars: int = 8_000
    queries: int = 256
    texts: int = 2_048
    top_k: int = 1_000
    results: int = 10_000
    where_depth: int = 4
    where_values: int = 1_000
    body_bytes: int = 8 << 20
    all_bodies_bytes: int = 128 << 20
    chunks: int = 4_096
    body_s: float = 15.0
    header_s: float = 15.0
    send_s: float = 30.0
    answer_s: float = 60.0
    waiting_texts: int = 4_096
    batch_texts: int = 64
    connections: int = 800


@dataclass(frozen=True)
class Settings:
    """All that a service is told when it starts; can be pickled, for its workers.

    Attributes:
        index: Folder of the saved index.
        model: Folder or name; None for the one that made the index.
        device: torch's name of one; None for the best.
        retriever: What searches: "torch" or "faiss".
        keep_alive: How long an idle model is kept; see `torch_utils.ModelHost`.
        isolation: Whether the model lives in this process or in one of its own.
        host: Address that is listened on.
        port: The same; 0 for one that is free.
        workers: Processes that serve.
        token: What a client must know, as ``Authorization: Bearer TOKEN``; None for nothing.
        drain_s: Seconds from the signal to stop until nothing is accepted any more.
        limits: What clients may ask.
    """

    index: Path
    model: str | None = None
    device: str | None = None
    retriever: Literal["torch", "faiss"] = "torch"
    keep_alive: float | str = "5m"
    isolation: Literal["thread", "process"] = "thread"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = field(default=None, repr=False)
    drain_s: float = 0.0
    limits: Limits = field(default_factory=Limits)


def is_loopback(host: str | None) -> bool:
    """Whether an address, or a name, is this machine's own, which no other can reach."""
    if host is None:
        return False
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # ::ffff:127.0.0.1 is how a listener on :: calls 127.0.0.1; Python knows that since 3.13.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
