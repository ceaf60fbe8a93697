"""Lane: the queue of a model and the thread that computes.

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import groupby
from queue import Queue as Calls
from typing import Any

from starlette.requests import ClientDisconnect

from rag_demo.service import metrics
from rag_demo.service.engine import Engine, Hosted
from rag_demo.service.jobs import Item, Job, compute
from rag_demo.service.logs import REQUEST_ID
from rag_demo.service.responses import Problem, overloaded, problem_of

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


class Queue:
    """Texts in the order of their arrival, and the measured rate at which they are finished."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.tokens = self.taken = 0  # of texts that wait, and of the batch that runs
        self._done, self._seconds, self._measured_at = 0.0, 0.0, 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second; None before the first batch."""
        return self._done / self._seconds if self._seconds else None

    def admit(self, job: Job, left_s: float) -> None:
        """Append the texts of a job.

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
        self.items.extend((job, text) for text in job.texts)
        self.tokens += tokens

    def take(self, budget: float) -> list[Item]:
        """Take texts of about so many tokens, and at least one text."""
        items: list[Item] = []
        while self.items:
            job, text = self.items[0]
            if not job.answer.done():  # Otherwise it was dropped.
                tokens = job.tokens[job.taken]
                if items and tokens > budget:
                    break
                budget -= tokens
                job.taken += 1
                self.tokens, self.taken = self.tokens - tokens, self.taken + tokens
                items.append((job, text))
            self.items.popleft()
        return items

    def drop(self, job: Job) -> None:
        """Forget the tokens of a job that is answered before all its texts were taken."""
        self.tokens -= sum(job.tokens[job.taken :])
        job.taken = len(job.texts)

    def measure(self, seconds: float) -> None:
        """Count a batch that has succeeded; what fails at once would look fast."""
        self._done = _FORGET * self._done + self.taken
        self._seconds = _FORGET * self._seconds + max(seconds, 1e-6)
        self._measured_at = time.perf_counter()


class DaemonThread:
    """Runs calls one after the other in a daemon thread, until `stop`.

    The interpreter joins the threads of `concurrent.futures` at exit, so a call that hangs would
    keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        # A thread that waits in C, as in SimpleQueue, would make `release` keep tensors.
        self._calls: Calls[Any] = Calls()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Queue a call and return its future in the running event loop."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread after the calls that are queued now."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function, arguments = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except Exception as error:  # For the caller.
                    future.set_exception(error)
                except BaseException as error:  # A panic or SystemExit must not end the loop.
                    future.set_exception(RuntimeError(f"the call raised {error!r}"))
            del item, future, function, arguments


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
        self._running: list[Item] = []
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

    def stop_loading(self) -> None:
        """Refuse what needs a load from now on: it may take longer than a stop."""
        self._is_stopping = True
        if self._is_loading:
            for job, _ in [*self._small.items, *self._bulk.items, *self._running]:
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
                    if items := queue.take(min(budget, self._settings.batch_tokens)):
                        is_busy = True
                        await self._compute(queue, items)
            if not is_busy:
                if self._is_closed:
                    return
                await self._wake.wait()

    async def _compute(self, queue: Queue, items: list[Item]) -> None:
        started = time.perf_counter()
        if queue is self._small:
            self._last_small = started
        metrics.BATCH.labels(self.name).observe(queue.taken)
        for job in dict.fromkeys(job for job, _ in items if not job.results):
            metrics.QUEUE_SECONDS.labels(self.name).observe(started - job.queued_at)
        self._running = items
        outcomes, seconds = await self._thread.call(self._run, items)
        self._running = []
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
            if len(job.results) == len(job.texts):
                job.answer.set_result(job.results)

    @contextlib.contextmanager
    def _limited(self, what: str, limit_s: float) -> Iterator[None]:
        self._phase = what, time.monotonic(), limit_s
        try:
            yield
        finally:
            self._phase = None

    def load(self) -> None:
        """Load the model, even if the last load has failed. Runs in the thread, by `call`.

        Raises:
            Exception: The load failed.
        """
        if self._model is not None:
            if self._is_stopping and self._model.host.state != "loaded":
                raise _stopping()
            with self._limited(_LOADING, self._settings.load_timeout):
                self._model.load()

    def _run(self, items: list[Item]) -> tuple[list[Any], float]:
        """Return the result of each text or a `Problem`, and the seconds without a load.

        Runs in the thread.
        """
        try:
            if self._model is not None and self._model.error is not None:
                raise self._model.error  # Only `load` tries again.
            self.load()
        except BaseException as error:  # After any error the next attempt may succeed.
            return [_failed(error, items[0][0])] * len(items), 0.0
        started = time.perf_counter()
        return self._answers(items), time.perf_counter() - started

    def _answers(self, items: list[Item]) -> list[Any]:
        try:
            with self._limited("a call of the model", self._settings.hang_timeout):
                return compute(self._engine, items)
        except BaseException as error:
            # A tokenizer's panic or a model's sys.exit() must not end the thread.
            parts = [list(part) for _, part in groupby(items, lambda item: id(item[0]))]
            if len(parts) == 1:
                return [_failed(error, items[0][0])] * len(items)
            log.debug("a batch of %d jobs failed and is retried one by one: %r", len(parts), error)
            return [outcome for part in parts for outcome in self._answers(part)]


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
