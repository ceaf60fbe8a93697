"""Service: the state that all routes share. It runs jobs, reloads, and changes the index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request

from rag_demo.errors import IndexChangedError, PostgresError, RagDemoError
from rag_demo.service import metrics
from rag_demo.service.engine import Engine, Hosted, LoadModel
from rag_demo.service.jobs import Job
from rag_demo.service.lane import Lane
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Settings, Tokens
from torch_utils import ModelInUseError
from torch_utils.hosting.lease import run_in_thread

log = logging.getLogger("rag_demo.service")
_TICK_S = 0.5
_LONGEST_PAUSE_S = 30.0  # between two loads that fail
_CLOSING_S = 3.0
_REPORTED = ("freed_bytes", "returned_bytes", "duration_s")  # Holders may be files of the server.


class Service:
    """A running service. Belongs to one event loop.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        draining: Whether the service is stopping.
        failure: Why the first load failed, if only a person can repair that.
        on_failure: Called when ``failure`` is set.

    Raises:
        RagDemoError: There is no index, or it is damaged.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings, self.tokens = settings, Tokens(settings)
        self.draining = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.engine = engine = Engine(settings, load)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lanes = {"words": Lane("words", engine, None)}
        for name, model in zip(("model", "reranker"), engine.models, strict=False):
            self.lanes[name] = Lane(name, engine, model)
            self.start(self._keep_loaded(self.lanes[name], model))
        if settings.reload_interval and not settings.writable:
            self.start(self._watch())
        for figure in metrics.POOL_FIGURES:
            metrics.POOL.labels(figure).set_function(partial(engine.pool, figure))
        self._show_version()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, at most until `close`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop_loading(self) -> None:
        """Refuse the requests that need a load: it may take longer than a stop."""
        for lane in self.lanes.values():
            lane.stop_loading()

    async def close(self) -> None:
        """Finish the queues, then close the engine; do not wait for a call that hangs."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        are_idle = await asyncio.gather(*(lane.close() for lane in self.lanes.values()))
        try:
            await run_in_thread(partial(self.engine.close, _CLOSING_S if all(are_idle) else 0.0))
        except ModelInUseError as error:
            log.error("a call or a load of a model hangs and cannot be ended: %s", error)
        else:
            log.info("stopped: the models and the index are closed")

    async def run(
        self, request: Request | None, job: Job, deadline: float | None = None
    ) -> list[Any]:
        """Run a job in its lane; see `Lane.run`. By default the deadline is ``timeout`` from now.

        Returns:
            One result for each text.
        """
        return await self.lanes[job.lane].run(request, job, deadline or self.deadline())

    def deadline(self) -> float:
        """Return when the answer to a request that arrives now is due, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.timeout

    @property
    def hang(self) -> str:
        """Why the service needs a restart; "" if it does not."""
        return next((lane.failure for lane in self.lanes.values() if lane.failure), "")

    async def not_ready(self) -> str:
        """Return why requests cannot be answered; "" if they can."""
        if self.draining:
            return "the service is stopping"
        if reason := self.hang:
            log.warning("not ready: %s", reason)
            return reason
        for model in self.engine.models:
            if model.error is not None:
                return public_reason(model.error)
            if not model.has_loaded:
                return "the model is being loaded"
        if self.engine.databases or self.engine.index.state != "loaded":
            try:
                self.engine.documents, self.engine.version = await run_in_thread(self.engine.look)
                self._show_version()
            except RagDemoError as error:
                log.warning("not ready: %s", error)
                return public_reason(error)
        return ""

    async def _keep_loaded(self, lane: Lane, model: Hosted) -> None:
        """Load the model, and retry after failures: an unready service gets no requests."""
        pause_s = _TICK_S
        while True:
            if model.error is not None or not model.has_loaded:
                try:
                    if lane.name == "model":
                        await lane.call(self.engine.index.load)
                    await lane.call(lane.load)
                    log.info("loaded %s", model.host.name)
                    pause_s = _TICK_S
                except Exception as error:  # After any error the next attempt may succeed.
                    is_lasting = isinstance(error, RagDemoError) and not model.has_loaded
                    if is_lasting and not isinstance(error, PostgresError):
                        self.failure = error
                        self.on_failure()
                        return
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    log.error("cannot load, next attempt in %.0f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)

    async def _watch(self) -> None:
        """Reload when another process has written a new version of the index."""
        while True:
            await asyncio.sleep(self.settings.reload_interval)
            try:
                _, version = await run_in_thread(self.engine.look)
                if version != self.engine.version:
                    await self.reload()
            except Exception as error:  # The old version stays in use, whatever the error is.
                log.error("no new version can be opened: %r", error)

    async def reload(self) -> dict[str, Any]:
        """Open the index again. The old one answers until the new one is open.

        Returns:
            The number of documents now and before, the version and the duration in seconds.

        Raises:
            Problem: The new index cannot be opened; the old one stays in use.
        """
        async with self._changing:
            return await self._reload()

    async def _reload(self) -> dict[str, Any]:
        started, before = time.perf_counter(), self.engine.documents
        try:
            await run_in_thread(self.engine.reload)
        except Exception as error:
            # After any error of the new index the old one still works.
            log.error("reload failed, the old index stays in use: %s", error, exc_info=error)
            raise Problem(409, f"{public_reason(error)}; the old index is still in use") from None
        self._show_version()
        documents, seconds = self.engine.documents, time.perf_counter() - started
        log.info("reloaded: %d documents, %d before, in %.1f s", documents, before, seconds)
        return {
            "documents": documents,
            "documents_before": before,
            "index_version": self.engine.version,
            "duration_s": seconds,
        }

    async def reload_on_signal(self) -> None:
        """Read tokens again, and reload."""
        try:
            self.tokens.read()
        except RagDemoError as error:
            log.error("the old tokens stay in use: %s", error)
        with contextlib.suppress(Problem):  # It is in the log.
            await self.reload()

    async def unload(self, name: str) -> dict[str, Any]:
        """Unload a model or the index between two batches.

        Returns:
            The report of the release.

        Raises:
            Problem: The name is unknown, or the model is in use.
        """
        hosts = self.engine.hosts
        if name not in hosts:
            raise Problem(404, f"unknown model; available: {', '.join(hosts)}")
        is_reranker = hosts[name] is self.engine.models[-1].host and len(hosts) > 2
        lane = self.lanes["reranker" if is_reranker else "model"]
        try:
            if lane.failure or hosts[name].state == "loading":
                raise ModelInUseError
            report = await lane.call(hosts[name].unload)
        except ModelInUseError:
            raise Problem(409, "the model is in use; try again") from None
        counts = {"still_held": len(report.still_held), "errors": len(report.errors)}
        return {**counts, **{field: getattr(report, field) for field in _REPORTED}}

    async def change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        """Change the index and save it. Searches continue meanwhile.

        Args:
            change: Changes the index. It is called again if another process has changed it too.
            deadline: When the answer is due, in seconds of the event loop's clock.

        Returns:
            The result of ``change``.

        Raises:
            Problem: The index cannot be changed or saved; the old index stays in use. Or the time
                is over; the change is then either saved or not.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        changing = self.start(self._change(change))
        done, _ = await asyncio.wait([changing], timeout=max(0.0, left_s))
        if not done:
            changing.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise overloaded(5, "the change takes too long; it may still be saved", status=504)
        return changing.result()

    async def _change(self, change: Callable[[Any], Any]) -> Any:
        async with self._changing:
            for attempt in (1, 2):
                try:
                    result = await run_in_thread(partial(self.engine.change, change))
                    self._show_version()
                    return result
                except PostgresError:  # A transaction was rolled back.
                    raise
                except (TypeError, ValueError) as error:  # The client's documents are invalid.
                    raise Problem(422, str(error)[:500], param="documents") from None
                except Exception as error:  # From the disk, or another process has changed it.
                    log.error("the index cannot be changed: %s", error, exc_info=error)
                    await self._reload()  # After any failure the index must match its files again.
                    if attempt == 1 and isinstance(error, IndexChangedError):
                        continue
                    detail = "the index cannot be changed; the service's log says why"
                    raise Problem(409, detail) from None
        raise AssertionError("unreachable")

    def _show_version(self) -> None:
        metrics.INDEX_VERSION.clear()
        metrics.INDEX_VERSION.labels(self.engine.version).set(1)
        metrics.DOCUMENTS.set(self.engine.documents)


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.state.service
    return service
