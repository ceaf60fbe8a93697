"""The work of requests: one class for each kind of job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, SearchOptions
from rag_demo.service.responses import Problem

_BYTES_PER_TOKEN = 3
_SPECIAL_TOKENS = 2


@dataclass(eq=False)
class Job:
    """The texts of a request. Some of them are computed at a time, in their order.

    Attributes:
        texts: What to compute.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
        truncate: Whether to cut off texts that are too long. Otherwise they are refused.
        truncated: How many texts were cut off.
        request_id: For the log.
        answer: One result for each text. The lane makes it.
        results: The results so far.
        taken: How many texts have been taken from the queue.
        queued_at: Time of creation, by ``time.perf_counter``.
    """

    texts: Sequence[str]
    max_tokens: int | None = None
    truncate: bool = True
    truncated: int = 0
    request_id: str = ""
    answer: asyncio.Future[list[Any]] = field(init=False)
    results: list[Any] = field(default_factory=list)
    taken: int = 0
    queued_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.tokens = [self.estimate(text) for text in self.texts]

    @property
    def lane(self) -> Literal["model", "reranker", "words"]:
        """The queue in which the job waits."""
        return "model"

    @property
    def key(self) -> Any:
        """Texts of jobs with the same key are computed together."""
        raise NotImplementedError

    def estimate(self, text: str) -> int:
        """Return about how many tokens a text has: one for three bytes."""
        count = _SPECIAL_TOKENS + len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN
        return count if self.max_tokens is None else min(count, self.max_tokens)

    def compute(self, engine: Engine, texts: Sequence[str]) -> Iterable[Any]:
        """Compute texts of jobs with the same key.

        Returns:
            For each text a result, the number of its tokens, and how many the model reads.
        """
        raise NotImplementedError

    def checked(self, result: Any, count: int, most: int | None) -> Any:
        """Count the tokens of a text, and whether it was cut off.

        Returns:
            The result and the number of tokens that were read, or a `Problem`.
        """
        if most is not None and count > most:
            if not self.truncate:
                detail = f"a text has {count} tokens, and the model reads {most}"
                detail += "; shorten it or set truncate to true"
                return Problem(413, detail, param="inputs")
            self.truncated += 1
            count = most
        metrics.TOKENS.inc(count)
        return result, count


Item = tuple[Job, str]
"""A job and one of its texts."""


@dataclass(eq=False)
class EmbedJob(Job):
    """Texts to embed. A result is a vector and the number of its tokens; 0 if not counted.

    Attributes:
        kind: Whether the texts are queries or documents.
    """

    kind: Literal["query", "document"] = "document"

    @property
    def key(self) -> Any:
        """See `Job.key`."""
        return self.kind

    def compute(self, engine: Engine, texts: Sequence[str]) -> Iterable[Any]:
        """See `Job.compute`."""
        model = engine.model
        embed = model.embed_queries if self.kind == "query" else model.embed_documents
        return zip(embed(texts), model.count_tokens(texts, self.kind), repeat(model.max_tokens))


@dataclass(eq=False)
class SearchJob(Job):
    """Queries to search. A result is the list of a query's `SearchResult`s."""

    options: SearchOptions = field(kw_only=True)
    vectors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lane(self) -> Literal["model", "words"]:
        """See `Job.lane`."""
        return "words" if self.options.mode == "bm25" else "model"

    @property
    def key(self) -> Any:
        """See `Job.key`."""
        return repr(self.options)

    def compute(self, engine: Engine, texts: Sequence[str]) -> Iterable[Any]:
        """See `Job.compute`."""
        return zip(engine.search(texts, self.vectors, self.options))

    def checked(self, result: Any, count: int = 0, most: int | None = None) -> Any:
        """See `Job.checked`."""
        return result


@dataclass(eq=False)
class RerankJob(Job):
    """Texts to score as answers to a query. A result is a logit and the number of tokens."""

    query: str = ""

    @property
    def lane(self) -> Literal["reranker"]:
        """See `Job.lane`."""
        return "reranker"

    @property
    def key(self) -> Any:
        """See `Job.key`."""
        return self

    def estimate(self, text: str) -> int:
        """See `Job.estimate`."""
        return super().estimate(self.query + text)

    def compute(self, engine: Engine, texts: Sequence[str]) -> Iterable[Any]:
        """See `Job.compute`."""
        assert engine.reranker is not None
        return zip(*engine.rerank(self.query, texts), repeat(engine.reranker.max_tokens))


def compute(engine: Engine, items: Sequence[Item]) -> list[Any]:
    """Compute texts of several jobs together.

    Returns:
        For each text its result, or a `Problem` that is the job's own fault.
    """
    searches = [(job, text) for job, text in items if isinstance(job, SearchJob)]
    queries = dict.fromkeys(text for job, text in searches if job.lane == "model")
    found = engine.model.embed_queries([*queries]) if queries else ()
    vectors = dict(zip(queries, found, strict=True))
    groups: dict[Any, list[int]] = {}
    for row, (job, _) in enumerate(items):
        groups.setdefault(job.key, []).append(row)
    results: list[Any] = [None] * len(items)
    for rows in groups.values():
        job = items[rows[0]][0]
        if isinstance(job, SearchJob):
            job.vectors = vectors
        for row, outcome in zip(
            rows, job.compute(engine, [items[n][1] for n in rows]), strict=True
        ):
            results[row] = items[row][0].checked(*outcome)
    return results
