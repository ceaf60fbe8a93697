"""The work of requests: one class for each kind of job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, SearchOptions
from rag_demo.service.problems import Problem

_BYTES_PER_TOKEN = 3
_SPECIAL_TOKENS = 2


@dataclass(eq=False)
class Job:
    """The texts of a request. Some of them are computed at a time, in their order.

    Attributes:
        texts: What to compute.
        max_tokens: How many tokens of a text the model reads.
        truncate: Whether to cut off texts that are too long. Otherwise they are refused.
        truncated: How many texts were cut off.
        request_id: For the log.
        answer: One result for each text. The lane makes it.
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

    def estimate(self, text: str) -> int:
        """Return about how many tokens a text has: one for three bytes."""
        count = _SPECIAL_TOKENS + len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN
        return count if self.max_tokens is None else min(count, self.max_tokens)

    def counted(self, rows: list[Any], most: int | None) -> Any:
        """Count tokens and texts that were cut off.

        Args:
            rows: For each text a result and the number of its tokens before truncation.
            most: How many tokens of a text the model reads.

        Returns:
            The rows with the numbers of tokens that were read, or a `Problem`.
        """
        long = [row for row, (_, count) in enumerate(rows) if most is not None and count > most]
        if long and not self.truncate:
            place = self.taken - len(rows) + long[0]
            detail = f"text {place} has {rows[long[0]][1]} tokens; the model reads {most}"
            return Problem(413, f"{detail}; shorten it or set truncate to true", param="inputs")
        self.truncated += len(long)
        rows = [(result, min(count, most or count)) for result, count in rows]
        metrics.TOKENS.inc(sum(count for _, count in rows))
        return rows

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[Any, Sequence[str]]]) -> list[Any]:
        """Compute texts of several jobs together.

        Args:
            engine: The models and the index.
            parts: Jobs of this class, each with some of its texts.

        Returns:
            For each part its results, or a `Problem` that is the job's own fault.
        """
        raise NotImplementedError


@dataclass(eq=False)
class EmbedJob(Job):
    """Texts to embed. A result is a vector and the number of its tokens; 0 if not counted.

    Attributes:
        kind: Whether the texts are queries or documents.
    """

    kind: Literal["query", "document"] = "document"

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[EmbedJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        model, results = engine.model, [None] * len(parts)
        embeds = {"query": model.embed_queries, "document": model.embed_documents}
        for kind, embed in embeds.items():
            rows = [row for row, (job, _) in enumerate(parts) if job.kind == kind]
            texts = [text for row in rows for text in parts[row][1]]
            if texts:
                found = zip(embed(texts), model.count_tokens(texts, kind), strict=True)
                for row in rows:
                    job, its = parts[row]
                    results[row] = job.counted(list(islice(found, len(its))), model.max_tokens)
        return results


@dataclass(eq=False)
class SearchJob(Job):
    """Queries to search. A result is the list of a query's `SearchResult`s."""

    options: SearchOptions = field(kw_only=True)

    @property
    def lane(self) -> Literal["model", "words"]:
        """See `Job.lane`."""
        return "words" if self.options.mode == "bm25" else "model"

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[SearchJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        needed = dict.fromkeys(q for job, texts in parts if job.lane == "model" for q in texts)
        found = engine.model.embed_queries([*needed]) if needed else ()
        vectors = dict(zip(needed, found, strict=True))
        groups: dict[str, list[int]] = {}
        for row, (job, _) in enumerate(parts):
            groups.setdefault(repr(job.options), []).append(row)
        results: list[Any] = [None] * len(parts)
        for rows in groups.values():
            texts = [text for row in rows for text in parts[row][1]]
            hits = iter(engine.search(texts, vectors, parts[rows[0]][0].options))
            for row in rows:
                results[row] = list(islice(hits, len(parts[row][1])))
        return results


@dataclass(eq=False)
class RerankJob(Job):
    """Texts to score as answers to a query. A result is a logit and the number of tokens."""

    query: str = ""

    @property
    def lane(self) -> Literal["reranker"]:
        """See `Job.lane`."""
        return "reranker"

    def estimate(self, text: str) -> int:
        """See `Job.estimate`."""
        return super().estimate(self.query + text)

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[RerankJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        assert engine.reranker is not None
        most = engine.reranker.max_tokens
        return [
            job.counted(list(zip(*engine.rerank(job.query, texts), strict=True)), most)
            for job, texts in parts
        ]
