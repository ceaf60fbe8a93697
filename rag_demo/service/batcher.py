"""Batcher: embeds and searches for the requests of several clients together, in one thread.

A batch never waits for more requests; requests that arrive while a batch runs form the next batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, SearchOptions
from rag_demo.service.problems import ClientGoneError, Problem, overloaded
from rag_demo.service.settings import Limits
from rag_demo.service.threads import DaemonThread

log = logging.getLogger("rag_demo.service")
_CLOSING_S = 5.0  # for a call without a client
_POLL_S = 0.05
_CHANGE_FACTOR = 10  # A change embeds and saves, so it may take longer than an answer.


@dataclass(eq=False)
class Job:
    """One part of a request.

    Attributes:
        kind: What to do with the texts. "query" and "document" embed them.
        texts: Queries, or texts to embed or rerank.
        options: Options of a search.
        query: The query of a rerank.
        tokens: Whether to count tokens; "limit" also refuses texts that are too long.
        request_id: For the log.
        answer: The results for each query of a search, ``(vector, tokens)`` for each text to
            embed, or the scores of a rerank.
        is_started: Whether a batch contains the job.
        queued_at: Time of creation, by ``time.perf_counter``.
    """

    kind: Literal["search", "query", "document", "rerank"]
    texts: Sequence[str]
    options: SearchOptions | None = None
    query: str = ""
    tokens: Literal[False, True, "limit"] = False
    request_id: str = ""
    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    is_started: bool = False
    queued_at: float = field(default_factory=time.perf_counter)


class Batcher:
    """A queue of jobs and the thread that runs them. Belongs to one event loop.

    If a batch fails, its jobs run again one by one, so that only the job at fault fails.

    Args:
        engine: Returns the engine for a batch when the batch starts.
        limits: The service's limits.
    """

    def __init__(self, engine: Callable[[], Engine], limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self._queue: deque[Job] = deque()
        self._queued_texts = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._thread = DaemonThread("rag_demo.batches")
        self._call_due: float | None = None  # when the call under way counts as hung
        self._texts_per_s = 100.0  # measured, for Retry-After
        self._task = asyncio.get_running_loop().create_task(self._work(), name="batches")

    @property
    def failure(self) -> str:
        """Why the service does not work on requests; "" if it does."""
        if self._task.done() and not self._closed:
            return "the service has stopped working on requests; restart it"
        due = self._call_due
        if due is None or time.monotonic() <= due or self._engine().is_loading:
            return ""
        return f"a call of the model has not returned for more than {self._limits.answer_s:g} s"

    async def run(self, request: Any, job: Job, deadline: float, is_continuation: bool) -> Any:
        """Run a job for a request.

        Args:
            request: The client's request; if the client disconnects, the job is cancelled.
            job: The job.
            deadline: When the answer is due, in seconds of the event loop's clock.
            is_continuation: Whether an earlier job of the same request was accepted.

        Returns:
            The job's answer.

        Raises:
            Problem: The queue is full, the deadline has passed, or the job failed.
            ClientGoneError: The client has closed its connection.
        """
        if self._closed:
            raise overloaded(1, "the service is stopping", status=503)
        count = len(job.texts)
        is_full = self._queued_texts + count > self._limits.waiting_texts
        if is_full and self._queued_texts and not is_continuation:
            metrics.REFUSED.inc()
            wait_s = self._queued_texts / self._texts_per_s
            raise overloaded(wait_s, "too many requests are waiting; try again after Retry-After")
        job.request_id = request.scope.get("request_id", "")
        self._queue.append(job)
        self._count(count)
        self._wake.set()
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait(
                {job.answer, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if job.answer.done():
                return job.answer.result()
            if gone.done():
                raise ClientGoneError
            message = f"the answer was not ready within {self._limits.answer_s:g} s"
            raise overloaded(5, message, status=504 if job.is_started else 503)
        finally:
            job.answer.cancel()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def between_batches(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread of the batches."""

        def call() -> Any:
            self._call_due = time.monotonic() + _CHANGE_FACTOR * self._limits.answer_s
            try:
                return function()
            finally:
                self._call_due = None

        return await self._thread.call(call)

    async def close(self) -> bool:
        """Finish the queue and stop.

        Returns:
            Whether the thread is idle. A call that hangs goes on in its daemon thread.
        """
        self._closed = True
        self._wake.set()
        await asyncio.wait([self._task], timeout=_CLOSING_S)
        self._thread.stop()
        return self._task.done() and self._call_due is None

    def _count(self, change: int) -> None:
        self._queued_texts += change
        metrics.WAITING.set(self._queued_texts)

    async def _work(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            texts = sum(len(job.texts) for job in batch)
            started = time.perf_counter()
            metrics.BATCH.observe(texts)
            for job in batch:
                metrics.QUEUE_SECONDS.observe(started - job.queued_at)
            outcomes = await self._thread.call(self._do, batch)
            seconds = max(time.perf_counter() - started, 1e-6)
            metrics.INFERENCE_SECONDS.observe(seconds)
            self._texts_per_s += 0.1 * (texts / seconds - self._texts_per_s)
            for job, outcome in zip(batch, outcomes, strict=True):
                if job.answer.done():
                    continue
                if isinstance(outcome, Problem):
                    job.answer.set_exception(outcome)
                else:
                    job.answer.set_result(outcome)

    def _next_batch(self) -> list[Job]:
        """Take jobs up to the size of a batch; skip jobs without a client."""
        batch: list[Job] = []
        texts = 0
        while self._queue:
            job = self._queue[0]
            if batch and texts + len(job.texts) > self._limits.batch_texts:
                break
            self._queue.popleft()
            self._count(-len(job.texts))
            if not job.answer.done():
                job.is_started = True
                batch.append(job)
                texts += len(job.texts)
        return batch

    def _do(self, batch: list[Job]) -> list[Any]:
        """Return the result of each job, or a `Problem`. Runs in the thread."""
        self._call_due = time.monotonic() + self._limits.answer_s
        try:
            return _answers(self._engine(), batch)
        except BaseException as error:
            # A tokenizer's panic or a model's sys.exit() must not end the thread.
            if len(batch) == 1:
                return [_problem(error, batch[0])]
            log.debug("a batch of %d jobs failed and is retried one by one: %r", len(batch), error)
            return [None if job.answer.done() else self._do([job])[0] for job in batch]
        finally:
            self._call_due = None


def _problem(error: BaseException, job: Job) -> Problem:
    if isinstance(error, Problem):
        return error
    extra = {"request_id": job.request_id}
    log.error("a request failed: %r", error, exc_info=error, extra=extra)
    detail = "the model or the index cannot be used now; the service's log says why"
    return Problem(503, detail, code="unavailable", headers={"retry-after": "5"})


def _answers(engine: Engine, batch: list[Job]) -> list[Any]:
    answers: dict[Job, Any] = {}
    for job in batch:
        if job.tokens:
            try:
                answers[job] = _tokens(engine, job)
            except Problem as problem:  # Only this job is refused.
                answers[job] = problem
    jobs_of_all, batch = batch, [j for j in batch if not isinstance(answers.get(j), Problem)]
    queries = [
        text
        for job in batch
        if job.kind == "query" or (job.options is not None and job.options.mode != "bm25")
        for text in job.texts
    ]
    vectors: dict[str, Any] = {}
    if unique := list(dict.fromkeys(queries)):
        vectors = dict(zip(unique, engine.embed(unique, are_queries=True), strict=True))
    documents = [text for job in batch if job.kind == "document" for text in job.texts]
    embedded = iter(engine.embed(documents, are_queries=False) if documents else ())
    groups: dict[Any, list[Job]] = {}
    for job in batch:
        if job.options is not None:
            groups.setdefault(job.options.key, []).append(job)
        elif job.kind == "rerank":
            answers[job] = engine.rerank(job.query, job.texts)
        else:
            rows = [vectors[text] if job.kind == "query" else next(embedded) for text in job.texts]
            answers[job] = list(zip(rows, answers.get(job) or [0] * len(rows), strict=True))
    for jobs in groups.values():
        texts = [text for job in jobs for text in job.texts]
        assert jobs[0].options is not None
        found = iter(engine.search(texts, vectors, jobs[0].options))
        answers.update((job, [next(found) for _ in job.texts]) for job in jobs)
    return [answers[job] for job in jobs_of_all]


def _tokens(engine: Engine, job: Job) -> list[int] | None:
    """Count the tokens of each text that the model reads.

    Raises:
        Problem: A text is too long, and the job does not allow truncation.
    """
    counts = engine.count_tokens(job.texts, are_queries=job.kind == "query")
    most = engine.embedder.max_tokens
    if counts is None or most is None:
        return counts
    if job.tokens == "limit" and max(counts) > most:
        row = next(row for row, count in enumerate(counts) if count > most)
        detail = f"inputs[{row}] has {counts[row]} tokens; the model reads {most}"
        raise Problem(413, f"{detail}; shorten it or set truncate to true", param="inputs")
    counts = [min(count, most) for count in counts]
    metrics.TOKENS.inc(sum(counts))
    return counts


async def _disconnect(request: Any) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(_POLL_S)
