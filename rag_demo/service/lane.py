"""Lane: a model or the index in its host, with a thread that uses it and a queue before it.

Small jobs go before bulk, and each takes its turn: a query waits for the batch that runs, and not
for bulk that waits. A batch never waits for more requests; requests that arrive while a batch runs
form the next batch, and whole jobs are finished in order. More than a number of tokens do not wait.
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
_BATCH_INPUTS = 512
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
        self.taken = 0
        self.request_id, self.queued_at = REQUEST_ID.get(), time.perf_counter()


Item = tuple[Job, Any]
"""A job and one of its inputs."""


class Queue:
    """Jobs of one kind, small ones or bulk, in the order of their arrival.

    Attributes:
        tokens: Of the inputs that wait.
    """

    def __init__(self, most_tokens: int) -> None:
        self.tokens, self._most = 0, most_tokens
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """Append a job.

        Raises:
            Problem: Too many tokens are waiting.
        """
        tokens = sum(job.tokens)
        if self.tokens and self.tokens + tokens > self._most:
            metrics.REFUSED.inc()
            detail = f"about {self.tokens:,} tokens are waiting; try again after Retry-After"
            raise overloaded(1, detail)
        self._jobs.append(job)
        self.tokens += tokens

    def take(self, budget: int) -> tuple[list[Item], int]:
        """Take inputs of about so many tokens, and at least one; those of one key are together.

        Returns:
            The inputs, and how many tokens they have.
        """
        items: list[Item] = []
        taken = 0
        while self._jobs:
            job = self._jobs[0]
            if job.answer.done() or job.taken == len(job.inputs):  # It has failed, or is taken.
                self._jobs.popleft()
                continue
            tokens = job.tokens[job.taken]
            if items and (taken + tokens > budget or len(items) == _BATCH_INPUTS):
                break
            items.append((job, job.inputs[job.taken]))
            taken, job.taken = taken + tokens, job.taken + 1
        self.tokens -= taken
        return sorted(items, key=lambda item: item[0].key), taken

    def drop(self, job: Job) -> None:
        """Forget a job that is answered before all its inputs were taken."""
        self.tokens -= sum(job.tokens[job.taken :])
        job.taken = len(job.inputs)
        with contextlib.suppress(ValueError):  # It is no longer the first.
            self._jobs.remove(job)


class Lane:
    """A model or the index, and the jobs that wait for it. Belongs to one event loop.

    If a batch fails, its jobs run again one by one, so that only the job at fault fails. An error
    of the whole index or database fails the batch.

    Args:
        name: The name, for threads and metrics.
        host: The host of the model or the index.
        settings: The service's settings.
        batch_tokens: How many tokens are computed together, if the model does not say it.
        before: Called in the lane's thread before each batch.

    Attributes:
        error: Why the last load failed; None if it succeeded.
        has_loaded: Whether a load has succeeded.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
        dimension: Length of the model's vectors; 0 without them.
        batch_tokens: How many tokens are computed together.
    """

    def __init__(
        self,
        name: str,
        host: ModelHost[Any],
        settings: Settings,
        batch_tokens: int,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.host, self._settings, self._before = name, host, settings, before
        self.error: BaseException | None = None
        self.has_loaded = False
        self.max_tokens: int | None = None
        self.dimension, self.batch_tokens = 0, batch_tokens
        # Each has the limit for itself: bulk must not keep out what goes before it.
        self._small, self._bulk = (Queue(settings.max_waiting_tokens) for _ in range(2))
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
                    self.batch_tokens = int(getattr(model, "batch_tokens", self.batch_tokens))
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
                gone.result()  # Raises a refusal: the rest of the body is too large.
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
            for queue in (self._small, self._bulk):
                most = min(self._settings.batch_tokens, self.batch_tokens)
                items, tokens = queue.take(most)
                if items:
                    await self._compute(items, tokens)
                    self._wake.set()
            await self._wake.wait()

    async def _compute(self, items: list[Item], tokens: int) -> None:
        started = time.perf_counter()
        metrics.BATCH.labels(self.name).observe(tokens)
        for job in dict.fromkeys(job for job, _ in items if not job.results):
            metrics.QUEUE_SECONDS.labels(self.name).observe(started - job.queued_at)
        try:
            outcomes = await self.call(partial(self._run, items))
        except BaseException as error:  # Of the load: the next attempt may succeed.
            if isinstance(error, asyncio.CancelledError):
                raise
            outcomes = [_failed(error, items)] * len(items)
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

    def _run(self, items: list[Item], model: Any) -> list[Any]:
        """Return the result of each input, or a `Problem`. Runs in the lane's thread."""
        outcomes: list[Any] = []
        for _, group in groupby(items, lambda item: item[0].key):
            try:
                outcomes += self._answers(model, list(group))
            except _OF_ALL as error:  # The other groups would wait for it, too.
                return outcomes + [_failed(error, items)] * (len(items) - len(outcomes))
        return outcomes

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
