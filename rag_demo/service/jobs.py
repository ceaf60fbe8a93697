"""The work of requests: one class for each kind of job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, SearchOptions
from rag_demo.service.problems import Problem

Lane = Literal["model", "reranker", "words"]
_BYTES_PER_TOKEN = 3
_SPECIAL_TOKENS = 2
_PROMPT_BYTES = 256  # A text shorter than the model's limit by this is never cut off.


@dataclass(eq=False)
class Job:
    """The texts of a request. Some of them are computed at a time, in their order.

    Attributes:
        texts: What to compute.
        max_tokens: How many tokens of a text the model reads.
        request_id: For the log.
        answer: One result for each text. The lane makes it.
        taken: How many texts have been taken from the queue.
        queued_at: Time of creation, by ``time.perf_counter``.
    """

    texts: Sequence[str]
    max_tokens: int | None = None
    request_id: str = ""
    answer: asyncio.Future[list[Any]] = field(init=False)
    results: list[Any] = field(default_factory=list)
    taken: int = 0
    queued_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.tokens = [self.estimate(text) for text in self.texts]

    @property
    def lane(self) -> Lane:
        """The queue in which the job waits."""
        return "model"

    def estimate(self, text: str) -> int:
        """Return about how many tokens a text has: one for three bytes."""
        count = _SPECIAL_TOKENS + len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN
        return count if self.max_tokens is None else min(count, self.max_tokens)

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
        truncate: Whether to cut off texts that are too long. Otherwise they are refused.
        counts_all: Whether to count the tokens of short texts too.
        truncated: How many texts were cut off.
    """

    kind: Literal["query", "document"] = "document"
    truncate: bool = True
    counts_all: bool = False
    truncated: int = 0

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[EmbedJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        results: list[Any] = [job._count(engine, texts) for job, texts in parts]
        for kind in ("query", "document"):
            rows = [row for row, (job, _) in enumerate(parts) if job.kind == kind]
            rows = [row for row in rows if not isinstance(results[row], Problem)]
            texts = [text for row in rows for text in parts[row][1]]
            if texts:
                embed = (
                    engine.model.embed_queries
                    if kind == "query"
                    else (engine.model.embed_documents)
                )
                vectors = iter(embed(texts))
                for row in rows:
                    results[row] = [(next(vectors), count) for count in results[row]]
        return results

    def _count(self, engine: Engine, texts: Sequence[str]) -> list[int] | Problem:
        most = engine.model.max_tokens
        counts = [0] * len(texts)
        rows = [
            row
            for row, text in enumerate(texts)
            if self.counts_all
            or (most and len(text.encode("utf-8", "replace")) + _PROMPT_BYTES > most)
        ]
        found = engine.model.count_tokens([texts[row] for row in rows], self.kind) if rows else None
        if found is None:
            return counts
        for row, count in zip(rows, found, strict=True):
            if most is not None and count > most:
                if not self.truncate:
                    place = self.taken - len(texts) + row
                    detail = f"inputs[{place}] has {count} tokens; the model reads {most}"
                    return Problem(
                        413, f"{detail}; shorten it or set truncate to true", param="inputs"
                    )
                self.truncated += 1
                count = most
            counts[row] = count
        metrics.TOKENS.inc(sum(counts))
        return counts


@dataclass(eq=False)
class SearchJob(Job):
    """Queries to search. A result is the list of a query's `SearchResult`s."""

    options: SearchOptions = field(kw_only=True)

    @property
    def lane(self) -> Lane:
        """See `Job.lane`."""
        return "words" if self.options.mode == "bm25" else "model"

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[SearchJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        needed = [text for job, texts in parts if job.lane == "model" for text in texts]
        unique = list(dict.fromkeys(needed))
        vectors = (
            dict(zip(unique, engine.model.embed_queries(unique), strict=True)) if unique else {}
        )
        groups: dict[Any, list[int]] = {}
        for row, (job, _) in enumerate(parts):
            groups.setdefault(job.options.key, []).append(row)
        results: list[Any] = [None] * len(parts)
        for rows in groups.values():
            texts = [text for row in rows for text in parts[row][1]]
            found = iter(engine.search(texts, vectors, parts[rows[0]][0].options))
            for row in rows:
                results[row] = [next(found) for _ in parts[row][1]]
        return results


@dataclass(eq=False)
class RerankJob(Job):
    """Texts to score as answers to a query. A result is a logit and the number of tokens."""

    query: str = ""

    @property
    def lane(self) -> Lane:
        """See `Job.lane`."""
        return "reranker"

    def estimate(self, text: str) -> int:
        """See `Job.estimate`."""
        return super().estimate(self.query + text)

    @classmethod
    def run(cls, engine: Engine, parts: Sequence[tuple[RerankJob, Sequence[str]]]) -> list[Any]:
        """See `Job.run`."""
        results = []
        for job, texts in parts:
            scores, counts = engine.rerank(job.query, texts)
            metrics.TOKENS.inc(sum(counts))
            results.append(list(zip(scores, counts, strict=True)))
        return results
