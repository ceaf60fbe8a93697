"""Batches: what several clients ask at once is embedded, and searched for, together.

There is no waiting for more to come: while one batch is worked on, the next one gathers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_demo.service import metrics
from rag_demo.service.opened import Asked, Opened
from rag_demo.service.problems import Problem, too_busy
from rag_demo.service.settings import Limits

__all__ = ["Batcher", "Job"]

log = logging.getLogger("rag_demo.service")
Kind = Literal["search", "query", "document"]


@dataclass(eq=False)
class Job:
    """What one client asks.

    Attributes:
        kind: "search", or what to embed texts as.
        texts: Queries, or what to embed.
        asked: What of the answers to a search is wanted.
        answer: Is set when there is one; cancelled when nobody wants it any more.
    """

    kind: Kind
    texts: Sequence[str]
    asked: Asked | None = None
    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)


class Batcher:
    """One thread that works, and what waits for it.

    For one event loop. A job that fails is tried again alone where it was not alone, so that no
    client pays for what another asked.

    Args:
        opened: Returns what answers, at the moment when a batch begins.
        limits: How much may wait, and be worked on together.
    """

    def __init__(self, opened: Callable[[], Opened], limits: Limits) -> None:
        self._opened, self._limits = opened, limits
        self._waiting: deque[Job] = deque()
        self._waiting_texts = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "rag_demo.service")
        self._texts_per_s = 100.0  # measured as it works; for Retry-After
        self._task = asyncio.get_running_loop().create_task(self._work(), name="batches")

    @property
    def is_alive(self) -> bool:
        """Whether jobs are worked on, or were to the end."""
        return self._closed or not self._task.done()

    async def submit(self, job: Job, *, is_more: bool = False) -> Any:
        """Have a job done with others.

        Args:
            job: What is asked. If the caller is cancelled it is not begun any more.
            is_more: Whether it is the next part of one that was let in already.

        Raises:
            Problem: Too much waits, or the service stops.
        """
        if self._closed:
            raise too_busy(1, "the service is stopping; ask another", status=503)
        count = len(job.texts)
        is_full = self._waiting_texts + count > self._limits.waiting_texts
        if is_full and self._waiting_texts and not is_more:
            metrics.REFUSED.inc()
            wait_s = self._waiting_texts / self._texts_per_s
            raise too_busy(wait_s, "too many requests wait; come again after Retry-After")
        self._waiting.append(job)
        self._count(count)
        self._wake.set()
        try:
            return await job.answer
        finally:
            job.answer.cancel()

    def _count(self, change: int) -> None:
        self._waiting_texts += change
        metrics.WAITING.set(self._waiting_texts)

    async def between(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread that works, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Finish what was let in, and stop."""
        self._closed = True
        self._wake.set()
        await asyncio.wait([self._task])  # Even if that has failed, the rest is closed.
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = self._next_batch()
            if not batch:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            texts = sum(len(job.texts) for job in batch)
            metrics.BATCH.observe(texts)
            started = time.perf_counter()
            outcomes = await loop.run_in_executor(self._thread, self._do, batch)
            rate = texts / max(time.perf_counter() - started, 1e-6)
            self._texts_per_s += 0.1 * (rate - self._texts_per_s)
            for job, outcome in zip(batch, outcomes, strict=True):
                if job.answer.done():
                    continue
                if isinstance(outcome, BaseException):
                    job.answer.set_exception(outcome)
                else:
                    job.answer.set_result(outcome)

    def _next_batch(self) -> list[Job]:
        """Take what fits together; what nobody wants any more is dropped unread."""
        batch: list[Job] = []
        texts = 0
        while self._waiting:
            job = self._waiting[0]
            if batch and texts + len(job.texts) > self._limits.batch_texts:
                break
            self._waiting.popleft()
            self._count(-len(job.texts))
            if not job.answer.done():
                batch.append(job)
                texts += len(job.texts)
        return batch

    def _do(self, batch: list[Job]) -> list[Any]:
        """Work, in the thread; returns for each job its result, or an exception."""
        try:
            return _do_together(self._opened(), batch)
        except BaseException as error:
            # Whatever it is, it is the answer: a tokenizer's panic and a model's sys.exit() are no
            # Exceptions, and must not end all work. To whom it is, is found out one by one.
            if len(batch) == 1:
                return [_as_answer(error)]
            log.debug("a batch of %d failed, and is tried one by one: %r", len(batch), error)
            # Clients that have left meanwhile wait for nothing.
            return [None if job.answer.done() else self._do([job])[0] for job in batch]


def _as_answer(error: BaseException) -> BaseException:
    if isinstance(error, Problem):
        return error
    log.error("a batch failed: %r", error, exc_info=error)
    return Problem(
        503,
        "the model or the index cannot be used at the moment; the log says why",
        code="unavailable",
        headers={"retry-after": "5"},
    )


def _do_together(opened: Opened, batch: list[Job]) -> list[Any]:
    queries = [
        text
        for job in batch
        if job.kind == "query" or (job.asked is not None and job.asked.mode != "bm25")
        for text in job.texts
    ]
    unique = list(dict.fromkeys(queries))
    vectors = {}
    if unique:
        vectors = dict(zip(unique, opened.embed(unique, are_queries=True), strict=True))
    documents = [text for job in batch if job.kind == "document" for text in job.texts]
    embedded = iter(opened.embed(documents, are_queries=False) if documents else ())
    groups: dict[Any, list[Job]] = {}
    results: dict[int, Any] = {}
    for job in batch:
        if job.asked is not None:
            groups.setdefault(job.asked.key, []).append(job)
        elif job.kind == "query":
            results[id(job)] = [vectors[text] for text in job.texts]
        else:
            results[id(job)] = [next(embedded) for _ in job.texts]
    for jobs in groups.values():
        texts = [text for job in jobs for text in job.texts]
        assert jobs[0].asked is not None
        found = iter(opened.search(texts, vectors, jobs[0].asked))
        results.update((id(job), [next(found) for _ in job.texts]) for job in jobs)
    return [results[id(job)] for job in batch]
