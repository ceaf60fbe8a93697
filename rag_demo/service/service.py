"""Service: the state that all routes share. It runs jobs, reloads, and changes the index."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.convertors import PathConvertor, register_url_convertor

from rag_demo.errors import IndexChangedError, PostgresError, RagDemoError, WriterBusyError
from rag_demo.service import metrics
from rag_demo.service.engine import Engine, LoadModel, estimate
from rag_demo.service.lane import Job, Lane
from rag_demo.service.logs import log_error
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Limits, Settings, read_tokens
from torch_utils import ModelInUseError

log = logging.getLogger("rag_demo.service")
_TICK_S = 0.5
_LONGEST_PAUSE_S = 30.0  # between two loads that fail
_LOOK_S = 10.0  # between looks for a new version; each search looks too
_FRESH_S = 0.5  # A search waits so long for a new version, then it uses the old one.
_CLOSING_S = 3.0
_PAUSE_S = 0.2  # between two attempts to change the index
_REPORTED = ("freed_bytes", "returned_bytes", "duration_s")  # Holders may be files of the server.


class Service:
    """A running service. Belongs to one event loop.

    Args:
        settings: The service's settings.
        limits: The service's limits.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        draining: Whether the service is stopping.
        failure: Why the first load failed, if only a person can repair that.
        on_failure: Called when ``failure`` is set.

    Raises:
        RagDemoError: There is no index, or it is damaged.
    """

    def __init__(self, settings: Settings, limits: Limits, load: LoadModel | None = None) -> None:
        self.settings, self.limits, self.tokens = settings, limits, read_tokens(settings)
        self.draining = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.engine = Engine(settings, load)
        self.engine.refresh, self._stamp = self._refresh, self.engine.stamp()
        self._loop, self._changing = asyncio.get_running_loop(), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lanes = {
            name: Lane(name, hosted, settings) for name, hosted in self.engine.hosted.items()
        }
        for lane in self.lanes.values():
            self.start(self._keep_loaded(lane))
        self.start(self._watch())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, at most until `close`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin_to_stop(self) -> None:
        """Stop being ready, and refuse what would wait for a load."""
        self.draining = True
        for lane in self.lanes.values():
            lane.stop_loading()

    async def close(self) -> None:
        """Finish the queues; do not wait for a call that hangs. The hosts are closed afterwards."""
        self.begin_to_stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.close() for lane in self.lanes.values()))

    @property
    def is_in_use(self) -> bool:
        """Whether a load or a call still runs."""
        found = [hosted.host.status() for hosted in self.engine.hosted.values()]
        return any(each.leases or each.state == "loading" for each in found)

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
                self.engine.set_state(*await self.engine.index.call(lambda _: self.engine.look()))
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
                    await lane.load()
                    log.info("loaded %s", hosted.host.name)
                    pause_s = _TICK_S
                except Exception as error:  # After any error the next attempt may succeed.
                    is_lasting = isinstance(error, RagDemoError) and not hosted.has_loaded
                    if is_lasting and not isinstance(error, PostgresError):
                        self.failure = error
                        self.on_failure()
                        return
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    log_error(f"cannot load, next attempt in {pause_s:.0f} s", error)
            await asyncio.sleep(pause_s)

    async def _watch(self) -> None:
        """Read the files of tokens again, and look for a new version when no search does."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.tokens = read_tokens(self.settings)
            except RagDemoError as error:
                log.error("the old tokens stay in use: %s", error)
            if self.engine.index.host.state == "loaded":
                await self._open_new()

    def _refresh(self) -> None:
        """Open a new version of the index that another process has written. Runs in a thread.

        A version that cannot be opened is tried again later.
        """
        stamp = self.engine.stamp()
        if stamp != self._stamp and not self.draining:
            self._stamp = stamp
            opening = asyncio.run_coroutine_threadsafe(self._open_new(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                opening.result(_FRESH_S)

    async def _open_new(self) -> None:
        try:
            found = await self.engine.index.call(lambda _: self.engine.look())
            if found[1] != self.engine.version:
                await self.reload()
        except Problem:
            pass  # It is in the log.
        except Exception as error:  # Whatever it is, the old version stays in use.
            log_error("no new version can be opened", error)

    async def reload(self) -> None:
        """Open the index again. The old one answers until the new one is open.

        Raises:
            Problem: The new index cannot be opened; the old one stays in use.
        """
        async with self._changing:
            try:
                await self.engine.reload()
            except Exception as error:  # After any error of the new index the old one still works.
                log_error("reload failed, the old index stays in use", error)
                reason = public_reason(error)
                raise Problem(409, f"{reason}; the old index is still in use") from None
        log.info("reloaded: %d documents", self.engine.documents)

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
            report = await asyncio.wait_for(lane.unload(), self.settings.timeout)
        except (ModelInUseError, asyncio.TimeoutError):
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
                    return await self.engine.change(change)
                except PostgresError:  # A transaction was rolled back.
                    raise
                except (TypeError, ValueError) as error:  # The client's documents are invalid.
                    raise Problem(422, str(error)[:500], param="documents") from None
                except Exception as error:  # From the disk, or another process is changing it.
                    # It must match its files again. Their content is checked by the next search.
                    await self.engine.reload(check=False)
                    if not isinstance(error, (IndexChangedError, WriterBusyError)):
                        log_error("the index cannot be changed", error)
                        detail = "the index cannot be changed; the service's log says why"
                        raise Problem(409, detail) from None
                if asyncio.get_running_loop().time() > deadline - _PAUSE_S:
                    raise overloaded(5, "another process is changing the index", status=503)
                await asyncio.sleep(_PAUSE_S)


class _AnyConvertor(PathConvertor):
    """Any characters; starlette's own convertor ends before a newline."""

    regex = "(?s:.*)"


register_url_convertor("any", _AnyConvertor())


async def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.state.service
    return service


Running = Annotated[Service, Depends(service_of)]
"""The service, as a parameter of routes."""
