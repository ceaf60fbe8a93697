"""Lane: a model or the index in its host, with a thread that uses it and queues before it.

Small jobs go before bulk, and each takes its turn: a query waits for the batch that runs, and not
for bulk that waits. A batch never waits for more requests; requests that arrive while a batch runs
form the next batch, and whole jobs are finished in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

from starlette.requests import ClientDisconnect

from rag_demo.errors import IndexFileError, PostgresError
from rag_demo.service import metrics
from rag_demo.service.logs import REQUEST_ID, log_error
from rag_demo.service.responses import Problem, overloaded, problem_of
from rag_demo.service.settings import Settings
from torch_utils import ModelHost, ModelInUseError

_BULK_TOKENS = 1024  # of a job; a larger one is bulk
_SMALL_TURN_S, _BULK_TURN_S = 0.25, 0.05  # of a batch, by the measured rate
_WHOLE_S = 0.1  # A batch of the model that takes longer is computed in parts.
_FIRST_TOKENS = 256  # in a batch before anything is measured
_BATCH_INPUTS = 512  # A slow model is noticed within one batch, whatever was measured before.
_SAFETY = 0.8  # A measured rate may be too high.
_STALE_S = 60.0  # An older rate refuses nothing.
_FORGET = 0.8  # the weight of earlier batches in the measured rate
_LOOK_S = 1.0  # between looks for jobs that a slow batch makes late
_OF_ALL = (IndexFileError, PostgresError)  # errors that do not come from one of the jobs


class Job:
    """The inputs of a request. Some of them are computed at a time, in their order.

    Args:
        compute: Computes inputs with the model of a lane, and returns a result for each. Inputs of
            jobs whose functions have the same repr are computed together.
        inputs: The inputs.
        tokens: The estimated tokens of each input.

    Attributes:
        answer: The result of each input. The lane sets it.
        results: The results so far.
        taken: How many inputs have been taken from the queue.
        deadline: When the answer is due, by the event loop's clock. The lane sets it.
        request_id: For the log.
        queued_at: Time of creation, by ``time.perf_counter``.
    """

    def __init__(
        self, compute: Callable[..., Iterable[Any]], inputs: Sequence[Any], tokens: Sequence[int]
    ) -> None:
        self.compute, self.inputs, self.tokens = compute, inputs, tokens
        self.key = repr(compute)
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.results: list[Any] = []
        self.taken, self.deadline = 0, 0.0
        self.request_id, self.queued_at = REQUEST_ID.get(), time.perf_counter()


Item = tuple[Job, Any]
"""A job and one of its inputs."""


class Queue:
    """Jobs in the order of their arrival, and the measured rate at which they are computed.

    Attributes:
        began: When the batch that runs got its model, by ``time.monotonic``; None without one.
        tokens: Of the inputs that wait.
        taken: Tokens of the batch that runs.
    """

    def __init__(self, timeout_s: float) -> None:
        self.began: float | None = None
        self.tokens = self.taken = 0
        self._timeout_s = timeout_s
        self._jobs: deque[Job] = deque()
        self._done, self._seconds, self._measured_at = 0.0, 0.0, 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second, at most those of the running batch so far; None if unknown."""
        now, began, rates = time.monotonic(), self.began, []
        if self._seconds and now - self._measured_at < _STALE_S:
            rates.append(self._done / self._seconds)
        if began is not None and now > began:
            rates.append(self.taken / (now - began))
        return min(rates, default=None)

    def add(self, job: Job) -> None:
        """Append a job.

        Raises:
            Problem: By the measured rate it would not be finished in time.
        """
        if problem := self._refusal(job, self.taken + self.tokens):
            raise problem
        self._jobs.append(job)
        self.tokens += sum(job.tokens)

    def _refusal(self, job: Job, ahead: int) -> Problem | None:
        """Return why a job cannot be finished in time behind so many tokens; None if it can."""
        tokens, rate = sum(job.tokens[job.taken :]), self.rate
        if not rate:
            return None
        most_s = _SAFETY * self._timeout_s
        if tokens > _BULK_TOKENS and tokens / rate > most_s:
            detail = f"about {tokens:,} tokens; at most {int(most_s * rate):,} can be"
            return Problem(413, f"{detail} computed in time; send fewer texts in a request")
        left_s = _SAFETY * (job.deadline - asyncio.get_running_loop().time())
        wait_s = (ahead + tokens) / rate
        if not ahead or wait_s <= left_s:
            return None
        metrics.REFUSED.inc()
        detail = f"requests for about {wait_s:.0f} s are waiting; try again after Retry-After"
        return overloaded(wait_s - left_s, detail)

    def refuse_late(self) -> None:
        """Refuse the waiting jobs that the current rate makes late."""
        ahead = self.taken
        for job in self._jobs:
            if job.answer.done() or job.taken:
                continue
            if problem := self._refusal(job, ahead):
                job.answer.set_exception(problem)
            else:
                ahead += sum(job.tokens)

    def take(self, budget: float) -> list[Item]:
        """Take inputs of about so many tokens, and at least one; those of one key are together."""
        items: list[Item] = []
        while self._jobs:
            job = self._jobs[0]
            if job.answer.done() or job.taken == len(job.inputs):  # It was dropped, or is taken.
                self._jobs.popleft()
                continue
            tokens = job.tokens[job.taken]
            if items and (tokens > budget or len(items) == _BATCH_INPUTS):
                break
            items.append((job, job.inputs[job.taken]))
            budget, job.taken = budget - tokens, job.taken + 1
            self.tokens, self.taken = self.tokens - tokens, self.taken + tokens
        return sorted(items, key=lambda item: item[0].key)

    def drop(self, job: Job) -> None:
        """Forget the tokens of a job that is answered before all its inputs were taken."""
        self.tokens -= sum(job.tokens[job.taken :])
        job.taken = len(job.inputs)

    def finish(self, seconds: float) -> None:
        """End a batch; ``seconds`` is 0 if it failed, because what fails at once looks fast."""
        if seconds:
            self._done = _FORGET * self._done + self.taken
            self._seconds = _FORGET * self._seconds + seconds
            self._measured_at = time.monotonic()
        self.taken, self.began = 0, None


class Lane:
    """A model or the index, and the jobs that wait for it. Belongs to one event loop.

    If a batch fails, its jobs run again one by one, so that only the job at fault fails. An error
    of the whole index or database fails the batch.

    Args:
        name: The name, for threads and metrics.
        host: The host of the model or the index.
        settings: The service's settings.
        before: Called in the lane's thread before each batch.

    Attributes:
        error: Why the last load failed; None if it succeeded.
        has_loaded: Whether a load has succeeded.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
        dimension: Length of the model's vectors; 0 without them.
        batch_tokens: How many tokens the model computes together; 0 if that is unknown.
    """

    def __init__(
        self,
        name: str,
        host: ModelHost[Any],
        settings: Settings,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.host, self._settings, self._before = name, host, settings, before
        self.error: BaseException | None = None
        self.has_loaded = False
        self.max_tokens: int | None = None
        self.dimension = self.batch_tokens = 0
        self._small, self._bulk = Queue(settings.timeout), Queue(settings.timeout)
        small, bulk = self._small, self._bulk
        metrics.WAITING.labels(name).set_function(lambda: small.tokens + bulk.tokens)
        self._wake = asyncio.Event()
        # OpenMP makes its own threads again for each new thread that computes.
        self._thread = ThreadPoolExecutor(1, f"lane {name}")
        self._began: float | None = None  # when the thread began a load or a call
        self.task = asyncio.get_running_loop().create_task(self._work(), name=f"lane {name}")

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function of the model in the lane's thread; load the model if it is not loaded.

        Raises:
            Exception: The load has failed, or the function failed.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._lease_and_call, function
        )

    def _lease_and_call(self, function: Callable[[Any], Any]) -> Any:
        has_begun, self._began = False, time.monotonic()
        try:
            self._before()
            with self.host.lease() as model:
                has_begun, self._began = True, time.monotonic()  # The load is over.
                if not self.has_loaded:
                    self.max_tokens = getattr(model, "max_tokens", None)
                    self.dimension = int(getattr(model, "dimension", 0))
                    self.batch_tokens = int(getattr(model, "batch_tokens", 0))
                self.error, self.has_loaded = None, True
                return function(model)
        except BaseException as error:  # Extensions in other languages raise such errors too.
            if not has_begun:
                self.error = error
            raise
        finally:
            self._began = None

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return self.host.state == "loading"

    @property
    def failure(self) -> str:
        """Why the lane does not work on requests; "" if it does."""
        if self.task.done():
            return "the service has stopped working on requests; restart it"
        began, limit_s = self._began, self._settings.hang_timeout
        if began is not None and time.monotonic() - began > limit_s:
            what = "a load" if self.is_loading else "a call"
            return f"{what} of the {self.name} has not ended for more than {limit_s:g} s"
        return ""

    async def run(self, request: Any, job: Job, deadline: float) -> list[Any]:
        """Run a job.

        Args:
            request: The client's request; if the client disconnects, the job is dropped.
            job: The job.
            deadline: When the answer is due, in seconds of the event loop's clock.

        Returns:
            A result for each input.

        Raises:
            Problem: The queue is too long, the deadline has passed, or the job failed.
            ClientDisconnect: The client has closed its connection.
        """
        if reason := self.failure:
            raise overloaded(5, reason, status=503)
        if self.error is not None:
            raise problem_of(self.error)
        job.deadline = deadline
        chosen = self._small if sum(job.tokens) <= _BULK_TOKENS else self._bulk
        chosen.add(job)
        self._wake.set()
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait(
                {job.answer, gone},
                timeout=max(0.0, deadline - asyncio.get_running_loop().time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if job.answer.done():
                return job.answer.result()
            if gone.done():
                raise ClientDisconnect
            message = f"the answer was not ready within {self._settings.timeout:g} s"
            has_begun = job.taken and not self.is_loading
            raise overloaded(5, message, status=504 if has_begun else 503)
        finally:
            job.answer.cancel()
            chosen.drop(job)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            for chosen, turn_s in ((self._small, _SMALL_TURN_S), (self._bulk, _BULK_TURN_S)):
                if items := chosen.take(self._budget(chosen, turn_s)):
                    await self._compute(chosen, items)
                    self._wake.set()
            await self._wake.wait()

    def _budget(self, chosen: Queue, turn_s: float) -> float:
        """Return the tokens of the next batch: those of a turn, or a whole batch of the model.

        Less than a whole batch may not keep the device busy, but a query may have to wait for it.
        """
        rate, tokens = chosen.rate or self._small.rate, float(self.batch_tokens)
        if rate is None:
            tokens = tokens or _FIRST_TOKENS
        elif tokens < rate * turn_s or tokens > rate * _WHOLE_S:
            tokens = rate * turn_s
        return min(self._settings.batch_tokens, tokens)

    async def _compute(self, chosen: Queue, items: list[Item]) -> None:
        started = time.perf_counter()
        metrics.BATCH.labels(self.name).observe(chosen.taken)
        for job in dict.fromkeys(job for job, _ in items if not job.results):
            metrics.QUEUE_SECONDS.labels(self.name).observe(started - job.queued_at)
        call = asyncio.ensure_future(self.call(partial(self._run, chosen, items)))
        try:
            while not (await asyncio.wait([call], timeout=_LOOK_S))[0]:
                chosen.refuse_late()
            outcomes, seconds = call.result()
        except BaseException as error:  # Of the load: the next attempt may succeed.
            if isinstance(error, asyncio.CancelledError):
                raise
            outcomes, seconds = [_failed(error, items)] * len(items), 0.0
        has_failed = any(isinstance(outcome, Problem) for outcome in outcomes)
        chosen.finish(0.0 if has_failed else seconds)
        chosen.refuse_late()
        metrics.INFERENCE_SECONDS.labels(self.name).observe(time.perf_counter() - started)
        for (job, _), outcome in zip(items, outcomes, strict=True):
            if job.answer.done():
                continue
            if isinstance(outcome, Problem):
                job.answer.set_exception(outcome)
                continue
            job.results.append(outcome)
            if len(job.results) == len(job.inputs):
                job.answer.set_result(job.results)
        if self.error is not None and self.host.state == "loaded":
            # The index is damaged; the next call opens it again.
            with contextlib.suppress(ModelInUseError):
                await asyncio.to_thread(self.host.unload)

    def _run(self, chosen: Queue, items: list[Item], model: Any) -> tuple[list[Any], float]:
        """Return the result of each input or a `Problem`, and the seconds. Runs in a thread."""
        outcomes: list[Any] = []
        chosen.began = started = time.monotonic()
        for _, group in groupby(items, lambda item: item[0].key):
            try:
                outcomes += self._answers(model, list(group))
            except _OF_ALL as error:  # The other groups would wait for it, too.
                outcomes += [_failed(error, items)] * (len(items) - len(outcomes))
                break
        return outcomes, max(time.monotonic() - started, 1e-6)

    def _answers(self, model: Any, items: list[Item]) -> list[Any]:
        job = items[0][0]
        try:
            return list(job.compute(model, [each for _, each in items]))
        except BaseException as error:
            # A tokenizer's panic or a model's sys.exit() must not end the thread.
            if isinstance(error, IndexFileError):
                self.error = error
            parts = [list(part) for _, part in groupby(items, lambda item: id(item[0]))]
            if isinstance(error, _OF_ALL):
                raise
            if len(parts) == 1:
                return [_failed(error, items)] * len(items)
            outcomes: list[Any] = []
            for part in parts:
                outcomes += self._answers(model, part)
            return outcomes


def _failed(error: BaseException, items: list[Item]) -> Problem:
    """Log why a batch has failed: one line for an error that says what to do."""
    if not isinstance(error, Problem):
        log_error("a batch failed", error, request_id=items[0][0].request_id)
    return problem_of(error)


async def _disconnect(request: Any) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0.05)
