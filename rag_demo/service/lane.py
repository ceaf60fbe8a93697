"""Lane: the queue of a model or the index, and the thread that computes.

Small jobs go before bulk, and each takes its turn. A bulk job is computed in parts, and whole jobs
are finished in order. A batch never waits for more requests; requests that arrive while a batch
runs form the next batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from queue import Queue as Calls
from typing import Any

from starlette.requests import ClientDisconnect

from rag_demo.errors import IndexFileError
from rag_demo.service import metrics
from rag_demo.service.engine import Hosted
from rag_demo.service.logs import REQUEST_ID
from rag_demo.service.responses import Problem, overloaded, problem_of
from rag_demo.service.settings import Settings
from torch_utils import ModelInUseError
from torch_utils.hosting.lease import run_in_thread

log = logging.getLogger("rag_demo.service")
_BULK_TOKENS = 1024  # of a job; a smaller one goes before bulk
_SMALL_TURN_S, _BULK_TURN_S = 0.25, 0.05
_FIRST_TOKENS = 256  # in a batch before anything is measured
_SAFETY = 0.8  # A measured rate may be too high.
_STALE_S = 60.0  # An older rate refuses nothing.
_FORGET = 0.8  # the weight of earlier batches in the measured rate
_CLOSING_S, _ENDING_S = 3.0, 0.5


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
        self.taken, self.request_id, self.queued_at = 0, REQUEST_ID.get(), time.perf_counter()


Item = tuple[Job, Any]
"""A job and one of its inputs."""


class Queue:
    """Inputs in the order of their arrival, and the measured rate at which they are finished."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.tokens = self.taken = 0  # of inputs that wait, and of the batch that runs
        self._done, self._seconds, self._measured_at = 0.0, 0.0, 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second; None before the first batch."""
        return self._done / self._seconds if self._seconds else None

    def admit(self, job: Job, left_s: float) -> None:
        """Append the inputs of a job.

        Raises:
            Problem: By the measured rate it would not be finished in time.
        """
        tokens = sum(job.tokens)
        if self.rate is not None and time.perf_counter() - self._measured_at < _STALE_S:
            left_s *= _SAFETY
            wait_s = (self.taken + self.tokens + tokens) / self.rate
            if tokens > _BULK_TOKENS and tokens / self.rate > left_s:
                detail = f"about {tokens:,} tokens; at most {int(left_s * self.rate):,} can be"
                raise Problem(413, f"{detail} computed in time; send fewer texts in a request")
            if self.tokens + self.taken and wait_s > left_s:
                metrics.REFUSED.inc()
                detail = f"requests for about {wait_s:.0f} s are waiting"
                raise overloaded(wait_s - left_s, f"{detail}; try again after Retry-After")
        self.items.extend((job, each) for each in job.inputs)
        self.tokens += tokens

    def take(self, budget: float) -> list[Item]:
        """Take inputs of about so many tokens, and at least one; those of one key are together."""
        items: list[Item] = []
        while self.items:
            job, _ = self.items[0]
            if not job.answer.done():  # Otherwise it was dropped.
                tokens = job.tokens[job.taken]
                if items and tokens > budget:
                    break
                budget -= tokens
                job.taken += 1
                self.tokens, self.taken = self.tokens - tokens, self.taken + tokens
                items.append(self.items[0])
            self.items.popleft()
        return sorted(items, key=lambda item: item[0].key)

    def drop(self, job: Job) -> None:
        """Forget the tokens of a job that is answered before all its inputs were taken."""
        self.tokens -= sum(job.tokens[job.taken :])
        job.taken = len(job.inputs)

    def measure(self, seconds: float) -> None:
        """Count a batch that has succeeded; what fails at once would look fast."""
        self._done = _FORGET * self._done + self.taken
        self._seconds = _FORGET * self._seconds + max(seconds, 1e-6)
        self._measured_at = time.perf_counter()


class Lane:
    """Two queues for one model, and a daemon thread. Belongs to one event loop.

    The interpreter joins the threads of `concurrent.futures` at exit, so a call that hangs would
    keep the process from ending. If a batch fails, its jobs run again one by one, so that only the
    job at fault fails.

    Args:
        name: The name, for threads and metrics.
        hosted: The model or the index.
        settings: The service's settings.
    """

    def __init__(self, name: str, hosted: Hosted, settings: Settings) -> None:
        self.name, self.hosted, self._settings = name, hosted, settings
        self._small, self._bulk = Queue(), Queue()
        self._wake = asyncio.Event()
        self._is_closed = self._is_stopping = False
        self._refusal = asyncio.get_running_loop().create_future()  # of jobs that need a load
        self._phase: tuple[str, float, float] | None = None  # what runs, since when, its limit
        # A thread that waits in C, as in SimpleQueue, would make `release` keep tensors.
        self._calls: Calls[Any] = Calls()
        small, bulk = self._small, self._bulk
        metrics.WAITING.labels(name).set_function(lambda: small.tokens + bulk.tokens)
        self._thread = threading.Thread(target=self._call_all, name=f"rag_demo.{name}", daemon=True)
        self._thread.start()
        self._task = asyncio.get_running_loop().create_task(self._work(), name=f"lane {name}")

    @property
    def failure(self) -> str:
        """Why the lane does not work on requests; "" if it does."""
        if self._task.done() and not self._is_closed:
            return "the service has stopped working on requests; restart it"
        if (phase := self._phase) is not None and time.monotonic() - phase[1] > phase[2]:
            return f"{phase[0]} of the {self.name} has not ended for more than {phase[2]:g} s"
        return ""

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return self.hosted.host.state == "loading"

    async def run(self, request: Any, job: Job, deadline: float) -> list[Any]:
        """Run a job.

        Args:
            request: The client's request; if the client disconnects, the job is dropped. None if
                something else notices that.
            job: The job.
            deadline: When the answer is due, in seconds of the event loop's clock.

        Returns:
            A result for each input.

        Raises:
            Problem: The queue is too long, the deadline has passed, or the job failed.
            ClientDisconnect: The client has closed its connection.
        """
        if self._is_closed or self._refusal.done():
            raise _stopping()
        if reason := self.failure:
            raise overloaded(5, reason, status=503)
        if self.hosted.error is not None:
            raise problem_of(self.hosted.error)
        left_s = deadline - asyncio.get_running_loop().time()
        queue = self._small if sum(job.tokens) <= _BULK_TOKENS else self._bulk
        queue.admit(job, left_s)
        self._wake.set()
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait(
                {job.answer, self._refusal, gone},
                timeout=max(0.0, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if job.answer.done():
                return job.answer.result()
            if self._refusal.done():
                raise _stopping()
            if gone.done():
                raise ClientDisconnect
            message = f"the answer was not ready within {self._settings.timeout:g} s"
            has_begun = job.taken and not self.is_loading
            raise overloaded(5, message, status=504 if has_begun else 503)
        finally:
            job.answer.cancel()
            queue.drop(job)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread, between two batches."""
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def _call_all(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            if future.set_running_or_notify_cancel():
                try:
                    finish = partial(future.set_result, function())
                except BaseException as error:  # A panic or SystemExit must not end the loop.
                    usual = error if isinstance(error, Exception) else RuntimeError(repr(error))
                    finish = partial(future.set_exception, usual)
                self._phase = None
                finish()
                del finish
            del item, future, function

    def stop_loading(self) -> None:
        """Refuse what needs a load from now on: it may take longer than a stop."""
        self._is_stopping = True
        if self.is_loading and not self._refusal.done():
            self._refusal.set_result(None)

    async def close(self) -> bool:
        """Finish the queues and stop. Wait some seconds for a call or a load.

        Returns:
            Whether the thread has ended. A call that hangs goes on in it.
        """
        self._is_closed = True
        self._wake.set()
        self.stop_loading()
        is_loading = self.is_loading
        if not is_loading:
            await asyncio.wait([self._task], timeout=_CLOSING_S)
        self._task.cancel()
        self._calls.put(None)
        left_s = _CLOSING_S if is_loading else _ENDING_S
        await run_in_thread(partial(self._thread.join, left_s))
        return not self._thread.is_alive()

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            for queue, turn_s in ((self._small, _SMALL_TURN_S), (self._bulk, _BULK_TURN_S)):
                budget = _FIRST_TOKENS if queue.rate is None else queue.rate * turn_s
                if items := queue.take(min(budget, self._settings.batch_tokens)):
                    await self._compute(queue, items)
                    self._wake.set()
            if self._is_closed and not self._wake.is_set():
                return
            await self._wake.wait()

    async def _compute(self, queue: Queue, items: list[Item]) -> None:
        started = time.perf_counter()
        metrics.BATCH.labels(self.name).observe(queue.taken)
        for job in dict.fromkeys(job for job, _ in items if not job.results):
            metrics.QUEUE_SECONDS.labels(self.name).observe(started - job.queued_at)
        outcomes, seconds = await self.call(partial(self._run, items))
        if not any(isinstance(outcome, Problem) for outcome in outcomes):
            queue.measure(seconds)
        queue.taken = 0
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

    def _lease(self) -> Any:
        if self._is_stopping and self.hosted.host.state != "loaded":
            raise _stopping()
        self._phase = "a load", time.monotonic(), self._settings.load_timeout
        return self.hosted.lease()

    def load(self) -> None:
        """Load the model, even if the last load has failed. Runs in the thread, by `call`.

        Raises:
            Exception: The load failed.
        """
        with self._lease():
            pass

    def _run(self, items: list[Item]) -> tuple[list[Any], float]:
        """Return the result of each input or a `Problem`, and the seconds without a load.

        Runs in the thread.
        """
        with contextlib.ExitStack() as stack:
            try:
                if self.hosted.error is not None:
                    raise self.hosted.error  # Only `load` tries again.
                model = stack.enter_context(self._lease())
            except BaseException as error:  # After any error the next attempt may succeed.
                return [_failed(error, items[0][0])] * len(items), 0.0
            started, outcomes = time.perf_counter(), []
            for _, group in groupby(items, lambda item: item[0].key):
                outcomes += self._answers(model, list(group))
            seconds = time.perf_counter() - started
        if self.hosted.error is not None:  # The index is damaged: open it again.
            with contextlib.suppress(ModelInUseError):
                self.hosted.host.unload()
        return outcomes, seconds

    def _answers(self, model: Any, items: list[Item]) -> list[Any]:
        job = items[0][0]
        self._phase = "a call", time.monotonic(), self._settings.hang_timeout
        try:
            return list(job.compute(model, [each for _, each in items]))
        except BaseException as error:
            # A tokenizer's panic or a model's sys.exit() must not end the thread.
            if isinstance(error, IndexFileError):
                self.hosted.error = error
            parts = [list(part) for _, part in groupby(items, lambda item: id(item[0]))]
            if len(parts) == 1:
                return [_failed(error, job)] * len(items)
            log.debug("a batch of %d jobs failed and is retried one by one: %r", len(parts), error)
            return [outcome for part in parts for outcome in self._answers(model, part)]


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
