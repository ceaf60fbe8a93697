"""Service: the state that all routes share. It runs jobs, reloads, and changes the index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request

from rag_demo.errors import IndexChangedError, PostgresError, RagDemoError, WriterBusyError
from rag_demo.service import metrics
from rag_demo.service.engine import Engine, LoadModel, estimate
from rag_demo.service.lane import Job, Lane
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Settings, read_tokens
from torch_utils import ModelInUseError
from torch_utils.hosting.lease import run_in_thread

log = logging.getLogger("rag_demo.service")
_TICK_S = 0.5
_LONGEST_PAUSE_S = 30.0  # between two loads that fail
_CLOSING_S = 3.0
_PAUSE_S = 0.2  # between two attempts to change the index
_REPORTED = ("freed_bytes", "returned_bytes", "duration_s")  # Holders may be files of the server.


class Service:
    """A running service. Belongs to one event loop.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        draining: Whether the service is stopping.
        has_ended: Whether `close` has left no thread of the service.
        failure: Why the first load failed, if only a person can repair that.
        on_failure: Called when ``failure`` is set.

    Raises:
        RagDemoError: There is no index, or it is damaged.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings, self.tokens = settings, read_tokens(settings)
        self.draining = self.has_ended = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.engine = Engine(settings, load)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lanes = {
            name: Lane(name, hosted, settings) for name, hosted in self.engine.hosted.items()
        }
        for lane in self.lanes.values():
            self.start(self._keep_loaded(lane))
        if settings.reload_interval and not settings.writable:
            self.start(self._watch())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, at most until `close`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Finish the queues, then close the engine; do not wait for a call that hangs."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        have_ended = await asyncio.gather(*(lane.close() for lane in self.lanes.values()))
        self.has_ended = all(have_ended)
        try:
            await run_in_thread(partial(self.engine.close, _CLOSING_S if self.has_ended else 0.0))
        except ModelInUseError as error:
            log.error("a call or a load has not ended in time: %s", error)
        else:
            log.info("stopped: the models and the index are closed")

    def deadline(self) -> float:
        """Return when the answer to a request that arrives now is due, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.timeout

    async def run_counted(
        self,
        request: Request | None,
        lane: str,
        compute: Callable[..., Any],
        texts: Sequence[str],
        deadline: float | None = None,
        *,
        truncate: bool = True,
    ) -> tuple[list[Any], int, int]:
        """Run a job whose function gives a result and the number of tokens of each text.

        Args:
            request: See `Lane.run`.
            lane: "model" or "reranker".
            compute: See `Job`.
            texts: The texts.
            deadline: See `Lane.run`; by default ``timeout`` from now.
            truncate: Whether to cut off texts that are too long. Otherwise they are refused.

        Returns:
            The results, the number of tokens that were read, and how many texts were cut off.
        """
        hosted = self.lanes[lane].hosted
        job = Job(compute, texts, estimate(texts, hosted.max_tokens))
        rows = await self.lanes[lane].run(request, job, deadline or self.deadline())
        most = hosted.max_tokens or max(count for _, count in rows)
        truncated = sum(count > most for _, count in rows)
        if truncated and not truncate:
            detail = f"{truncated} texts are longer than the {most} tokens that the model reads"
            raise Problem(413, f"{detail}; shorten them or set truncate to true", param="inputs")
        tokens = sum(min(count, most) for _, count in rows)
        metrics.TOKENS.inc(tokens)
        metrics.TRUNCATED.inc(truncated)
        return [result for result, _ in rows], tokens, truncated

    def state(self, **more: Any) -> dict[str, Any]:
        """Return the number of documents and the version of the index, with more fields."""
        engine = self.engine
        return {**more, "documents": engine.documents, "index_version": engine.version}

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
        for name, hosted in self.engine.hosted.items():
            if hosted.error is not None:
                return public_reason(hosted.error)
            if not hosted.has_loaded:
                return f"the {name} is being loaded"
        if self.engine.databases:
            try:
                self.engine.set_state(*await run_in_thread(self.engine.look))
            except RagDemoError as error:
                log.warning("not ready: %s", error)
                return public_reason(error)
        return ""

    async def _keep_loaded(self, lane: Lane) -> None:
        """Load the model, and retry after failures: an unready service gets no requests."""
        hosted, pause_s = lane.hosted, _TICK_S
        while True:
            if hosted.error is not None or not hosted.has_loaded:
                try:
                    await lane.call(lane.load)
                    log.info("loaded %s", hosted.host.name)
                    pause_s = _TICK_S
                except Exception as error:  # After any error the next attempt may succeed.
                    is_lasting = isinstance(error, RagDemoError) and not hosted.has_loaded
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

    async def reload(self) -> None:
        """Open the index again. The old one answers until the new one is open.

        Raises:
            Problem: The new index cannot be opened; the old one stays in use.
        """
        async with self._changing:
            try:
                await run_in_thread(self.engine.reload)
            except Exception as error:
                # After any error of the new index the old one still works.
                log.error("reload failed, the old index stays in use: %s", error, exc_info=error)
                reason = public_reason(error)
                raise Problem(409, f"{reason}; the old index is still in use") from None
        log.info("reloaded: %d documents", self.engine.documents)

    async def reload_on_signal(self) -> None:
        """Read tokens again, and reload."""
        try:
            self.tokens = read_tokens(self.settings)
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
        lane = next((each for each in self.lanes.values() if each.hosted.host.name == name), None)
        if lane is None:
            raise Problem(404, "unknown model; see /admin/models")
        try:
            if lane.failure or lane.is_loading:
                raise ModelInUseError
            report = await lane.call(lane.hosted.host.unload)
        except ModelInUseError:
            raise Problem(409, "the model is in use; try again") from None
        counts = {"still_held": len(report.still_held), "errors": len(report.errors)}
        return {**counts, **{field: getattr(report, field) for field in _REPORTED}}

    async def change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        """Change the index and save it. Searches continue meanwhile.

        Args:
            change: Changes the index. It is called again while another process changes it too.
            deadline: When the answer is due, in seconds of the event loop's clock.

        Returns:
            The result of ``change``.

        Raises:
            Problem: The index cannot be changed or saved; the old index stays in use. Or the time
                is over; the change is then either saved or not.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        changing = asyncio.shield(self.start(self._change(change, deadline)))
        try:
            return await asyncio.wait_for(changing, max(0.0, left_s))
        except asyncio.TimeoutError:
            detail = "the change takes too long; it may still be saved"
            raise overloaded(5, detail, status=504) from None

    async def _change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        async with self._changing:
            while True:
                try:
                    return await run_in_thread(partial(self.engine.change, change))
                except PostgresError:  # A transaction was rolled back.
                    raise
                except (TypeError, ValueError) as error:  # The client's documents are invalid.
                    raise Problem(422, str(error)[:500], param="documents") from None
                except Exception as error:  # From the disk, or another process is changing it.
                    # It must match its files again. Their content is checked by the next search.
                    await run_in_thread(partial(self.engine.reload, check=False))
                    if not isinstance(error, (IndexChangedError, WriterBusyError)):
                        log.error("the index cannot be changed: %s", error, exc_info=error)
                        detail = "the index cannot be changed; the service's log says why"
                        raise Problem(409, detail) from None
                if asyncio.get_running_loop().time() > deadline - _PAUSE_S:
                    raise overloaded(5, "another process is changing the index", status=503)
                await asyncio.sleep(_PAUSE_S)


async def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.state.service
    return service


Running = Annotated[Service, Depends(service_of)]
"""The service, as a parameter of routes."""
