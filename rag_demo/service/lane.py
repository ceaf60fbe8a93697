"""Lane: the queue of a model and the thread that computes.

Small jobs go before bulk, and each takes its turn. A bulk job is computed in parts, and whole jobs
are finished in order. A batch never waits for more requests; requests that arrive while a batch
runs form the next batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, Hosted
from rag_demo.service.jobs import Job
from rag_demo.service.logs import REQUEST_ID
from rag_demo.service.problems import Problem, overloaded, problem_of
from rag_demo.service.threads import DaemonThread

log = logging.getLogger("rag_demo.service")
_BULK_TOKENS = 1024  # of a job; a smaller one goes before bulk
_TURN_S = 0.05  # of bulk work while small jobs arrive
_QUIET_TURN_S = 0.25  # otherwise
_QUIET_AFTER_S = 1.0
_SMALL_TURN_S = 0.25
_FIRST_TOKENS = 256  # in a batch before anything is measured
_SAFETY = 0.8  # A measured rate may be too high.
_STALE_S = 60.0  # An older rate refuses nothing.
_FORGET = 0.8  # the weight of earlier batches in the measured rate
_CLOSING_S = 3.0
_LOADING = "loading the model"
Part = tuple[Job, Sequence[str]]


class Queue:
    """Jobs in the order of their arrival, and the measured rate at which they are finished."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.tokens = self.taken = 0  # of jobs that wait, and of the batch that runs
        self._done, self._seconds, self._measured_at = 0.0, 0.0, 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second; None before the first batch."""
        return self._done / self._seconds if self._seconds else None

    def admit(self, job: Job, left_s: float) -> None:
        """Append a job.

        Raises:
            Problem: By the measured rate it would not be finished in time.
        """
        tokens = sum(job.tokens)
        if self.rate is not None and time.perf_counter() - self._measured_at < _STALE_S:
            wait_s = (self.taken + self.tokens + tokens) / self.rate
            if tokens > _BULK_TOKENS and tokens / self.rate > _SAFETY * left_s:
                most = int(_SAFETY * left_s * self.rate)
                detail = f"about {tokens:,} tokens; at most {most:,} can be computed in time"
                raise Problem(413, f"{detail}; send fewer texts in a request")
            if (self.jobs or self.taken) and wait_s > _SAFETY * left_s:
                metrics.REFUSED.inc()
                detail = (
                    f"requests for about {wait_s:.0f} s are waiting; try again after Retry-After"
                )
                raise overloaded(wait_s - _SAFETY * left_s, detail)
        self.jobs.append(job)
        self.tokens += tokens

    def take(self, budget: float) -> list[Part]:
        """Take texts of about so many tokens, and at least one text."""
        parts: list[Part] = []
        while self.jobs and (not parts or self.jobs[0].tokens[self.jobs[0].taken] <= budget):
            job = self.jobs[0]
            start = job.taken
            while job.taken < len(job.texts):
                tokens = job.tokens[job.taken]
                if tokens > budget and (parts or job.taken > start):
                    break
                budget -= tokens
                job.taken += 1
            tokens = sum(job.tokens[start : job.taken])
            self.tokens, self.taken = self.tokens - tokens, self.taken + tokens
            parts.append((job, job.texts[start : job.taken]))
            if job.taken < len(job.texts):
                break
            self.jobs.popleft()
        return parts

    def drop(self, job: Job) -> None:
        """Forget the rest of a job, if it is not finished."""
        with contextlib.suppress(ValueError):
            self.jobs.remove(job)
            self.tokens -= sum(job.tokens[job.taken :])

    def measure(self, tokens: int, seconds: float) -> None:
        """Count a batch, if all of it was computed; what fails at once would look fast."""
        if tokens == self.taken:
            self._done = _FORGET * self._done + tokens
            self._seconds = _FORGET * self._seconds + max(seconds, 1e-6)
            self._measured_at = time.perf_counter()
        self.taken = 0


class Lane:
    """Two queues for one model, and a thread. Belongs to one event loop.

    If a batch fails, its parts run again one by one, so that only the job at fault fails.

    Args:
        name: The name, for threads and metrics.
        engine: The models and the index.
        model: The model that the jobs need; None if they need only the index.
    """

    def __init__(self, name: str, engine: Engine, model: Hosted | None) -> None:
        self.name, self._engine, self._model = name, engine, model
        self._settings = engine.settings
        self._small, self._bulk = Queue(), Queue()
        self._last_small = 0.0
        self._wake, self._turn = asyncio.Event(), asyncio.Lock()
        self._is_closed = self._is_stopping = False
        self._running: list[Job] = []
        self._thread = DaemonThread(f"rag_demo.{name}")
        self._phase: tuple[str, float, float] | None = None  # what runs, since when, its limit
        small, bulk = self._small, self._bulk
        metrics.WAITING.labels(name).set_function(lambda: small.tokens + bulk.tokens)
        self._task = asyncio.get_running_loop().create_task(self._work(), name=f"lane {name}")

    @property
    def failure(self) -> str:
        """Why the lane does not work on requests; "" if it does."""
        if self._task.done() and not self._is_closed:
            return "the service has stopped working on requests; restart it"
        if (phase := self._phase) is not None and time.monotonic() - phase[1] > phase[2]:
            return f"{phase[0]} has not ended for more than {phase[2]:g} s"
        return ""

    @property
    def _is_loading(self) -> bool:
        return (phase := self._phase) is not None and phase[0] == _LOADING

    async def run(self, request: Any, job: Job, deadline: float) -> list[Any]:
        """Run a job.

        Args:
            request: The client's request; if the client disconnects, the job is dropped. None if
                something else notices that.
            job: The job.
            deadline: When the answer is due, in seconds of the event loop's clock.

        Returns:
            A result for each text.

        Raises:
            Problem: The queue is too long, the deadline has passed, or the job failed.
            ClientDisconnect: The client has closed its connection.
        """
        if self._is_closed or (self._is_stopping and self._is_loading):
            raise _stopping()
        if reason := self.failure:
            raise overloaded(5, reason, status=503)
        if self._model is not None and self._model.error is not None:
            raise problem_of(self._model.error)
        left_s = deadline - asyncio.get_running_loop().time()
        queue = self._small if sum(job.tokens) <= _BULK_TOKENS else self._bulk
        job.answer, job.request_id = asyncio.get_running_loop().create_future(), REQUEST_ID.get()
        queue.admit(job, left_s)
        self._wake.set()
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait(
                {job.answer, gone}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if job.answer.done():
                return job.answer.result()
            if gone.done():
                raise ClientDisconnect
            message = f"the answer was not ready within {self._settings.timeout:g} s"
            raise overloaded(5, message, status=504 if job.taken else 503)
        finally:
            job.answer.cancel()
            queue.drop(job)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function between two batches."""
        async with self._turn:
            return await self._thread.call(function)

    async def load(self) -> None:
        """Load the model between two batches, even if the last load has failed.

        Raises:
            Exception: The load failed.
        """
        await self.call(self._load)

    def stop_loading(self) -> None:
        """Refuse what needs a load from now on: it may take longer than a stop."""
        self._is_stopping = True
        if self._is_loading:
            for job in [*self._small.jobs, *self._bulk.jobs, *self._running]:
                if not job.answer.done():
                    job.answer.set_exception(_stopping())

    async def close(self) -> bool:
        """Finish the queues and stop. Do not wait for a load.

        Returns:
            Whether the thread is idle. A call that hangs goes on in its daemon thread.
        """
        self._is_closed = True
        self._wake.set()
        self.stop_loading()
        if not self._is_loading:
            await asyncio.wait([self._task], timeout=_CLOSING_S)
        self._task.cancel()
        self._thread.stop()
        return self._phase is None

    async def _work(self) -> None:
        while True:
            is_busy = False
            self._wake.clear()
            quiet = time.perf_counter() - self._last_small > _QUIET_AFTER_S
            for queue, turn_s in (
                (self._small, _SMALL_TURN_S),
                (self._bulk, _QUIET_TURN_S if quiet else _TURN_S),
            ):
                budget = _FIRST_TOKENS if queue.rate is None else queue.rate * turn_s
                async with self._turn:
                    if parts := queue.take(min(budget, self._settings.batch_tokens)):
                        is_busy = True
                        await self._compute(queue, parts)
            if not is_busy:
                if self._is_closed:
                    return
                await self._wake.wait()

    async def _compute(self, queue: Queue, parts: list[Part]) -> None:
        started = time.perf_counter()
        if queue is self._small:
            self._last_small = started
        tokens = queue.taken
        metrics.BATCH.labels(self.name).observe(tokens)
        for job, texts in parts:
            if job.taken == len(texts):
                metrics.QUEUE_SECONDS.labels(self.name).observe(started - job.queued_at)
        self._running = [job for job, _ in parts]
        outcomes, seconds = await self._thread.call(self._run, parts)
        self._running = []
        failed = any(isinstance(outcome, Problem) for outcome in outcomes)
        queue.measure(0 if failed else tokens, seconds)
        metrics.INFERENCE_SECONDS.labels(self.name).observe(time.perf_counter() - started)
        for (job, _), outcome in zip(parts, outcomes, strict=True):
            if job.answer.done():
                continue
            if isinstance(outcome, Problem):
                job.answer.set_exception(outcome)
                queue.drop(job)
                continue
            job.results += outcome
            if len(job.results) == len(job.texts):
                job.answer.set_result(job.results)

    @contextlib.contextmanager
    def _limited(self, what: str, limit_s: float) -> Iterator[None]:
        self._phase = what, time.monotonic(), limit_s
        try:
            yield
        finally:
            self._phase = None

    def _load(self) -> None:
        if self._model is not None:
            if self._is_stopping and self._model.host.state != "loaded":
                raise _stopping()
            with self._limited(_LOADING, self._settings.load_timeout):
                self._model.load()

    def _run(self, parts: list[Part]) -> tuple[list[Any], float]:
        """Return the results of each part or a `Problem`, and the seconds without a load.

        Runs in the thread.
        """
        try:
            if self._model is not None and self._model.error is not None:
                raise self._model.error  # Only `load` tries again.
            self._load()
        except BaseException as error:  # After any error the next attempt may succeed.
            return [_failed(error, job) for job, _ in parts], 0.0
        started = time.perf_counter()
        return self._answers(parts), time.perf_counter() - started

    def _answers(self, parts: list[Part]) -> list[Any]:
        try:
            with self._limited("a call of the model", self._settings.hang_timeout):
                found: dict[Job, Any] = {}
                for kind in {type(job) for job, _ in parts}:
                    its = [part for part in parts if type(part[0]) is kind]
                    for (job, _), outcome in zip(its, kind.run(self._engine, its), strict=True):
                        found[job] = outcome
                return [found[job] for job, _ in parts]
        except BaseException as error:
            # A tokenizer's panic or a model's sys.exit() must not end the thread.
            if len(parts) == 1:
                return [_failed(error, parts[0][0])]
            log.debug("a batch of %d jobs failed and is retried one by one: %r", len(parts), error)
            return [[] if part[0].answer.done() else self._answers([part])[0] for part in parts]


def _stopping() -> Problem:
    return overloaded(1, "the service is stopping", status=503)


def _failed(error: BaseException, job: Job) -> Problem:
    if not isinstance(error, Problem):
        extra = {"request_id": job.request_id}
        log.error("a request failed: %r", error, exc_info=error, extra=extra)
    return problem_of(error)


async def _disconnect(request: Any) -> None:
    """Wait until the client has closed its connection; for ever without a request."""
    if request is None:
        await asyncio.Event().wait()
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0.05)
