"""Service: the models and the index behind their queues, for all routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.convertors import PathConvertor, register_url_convertor

from rag_demo.errors import PostgresError, RagDemoError
from rag_demo.open_index import load_manifest
from rag_demo.service import metrics
from rag_demo.service.index import Index
from rag_demo.service.lane import Job, Lane
from rag_demo.service.logs import log_error
from rag_demo.service.models import LoadModel, estimate, load_checked, load_model, load_reranker
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Limits, Settings, read_tokens
from torch_utils import ModelHost, ModelInUseError

log = logging.getLogger("rag_demo.service")
_TICK_S = 0.5
_BATCH_TOKENS = {"model": 512, "reranker": 4096}  # of those that do not say it
_LONGEST_PAUSE_S = 30.0  # between two loads that fail
_REPORTED = ("freed_bytes", "returned_bytes", "duration_s")  # Holders may be files of the server.


class Service:
    """A running service. Belongs to one event loop.

    The models and the index are loaded in the background, and loaded again after a failure.

    Args:
        settings: The service's settings.
        limits: The service's limits.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        lanes: The lanes of "model", "reranker" (if there is one) and "index".
        index: The index.
        identity: The model that made the index.
        tokens: The tokens of clients, and those for administration and changes.
        draining: Whether the service is stopping.
        failure: Why the first load failed, if only a person can repair that.

    Raises:
        RagDemoError: There is no index, or it is damaged or empty.
    """

    def __init__(self, settings: Settings, limits: Limits, load: LoadModel | None = None) -> None:
        made_by = load_manifest(settings.index).model
        if made_by is None:
            raise RagDemoError("the index is empty; add documents to it with: rag-demo add")
        self.settings, self.limits, self.tokens = settings, limits, read_tokens(settings)
        self.identity, self.index = made_by, Index(settings, made_by)
        self.draining = False
        self.failure: BaseException | None = None
        self.model_id = settings.model or made_by.name
        name = settings.served_model_name or Path(self.model_id).name  # Without folders.
        self.model_name = "model" if name in ("", "index") else name
        device, trust = settings.device, settings.trust_remote_code
        options: Any = {"keep_alive": settings.keep_alive, "isolation": settings.isolation}
        if settings.isolation == "process":
            options["call_timeout_s"] = settings.hang_timeout
        made_with = {**made_by.options, "device": device, "trust_remote_code": trust}
        load = load or partial(load_model, self.model_id, made_with)
        load = partial(load_checked, load, made_by)
        hosts = {"model": ModelHost(load, name=self.model_name, **options)}
        if settings.reranker is not None:
            load = partial(load_reranker, settings.reranker, device, trust)
            hosts["reranker"] = ModelHost(load, name=Path(settings.reranker).name, **options)
        self.lanes = {
            name: Lane(name, host, settings, _BATCH_TOKENS[name]) for name, host in hosts.items()
        }
        most, index = settings.batch_tokens, self.index
        self.lanes["index"] = Lane("index", index.host, settings, most, index.refresh)
        self._tasks: set[asyncio.Task[Any]] = set()
        for lane in self.lanes.values():
            self._start(self._keep_loaded(lane))

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, at most until `close`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End what runs in the background. Calls may still run; their hosts wait for them."""
        tasks = [*self._tasks, *(lane.task for lane in self.lanes.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_loaded(self, lane: Lane) -> None:
        """Load the model, and retry after failures: an unready service gets no requests."""
        pause_s = _TICK_S
        while True:
            if lane.error is not None or not lane.has_loaded:
                try:
                    await lane.call(lambda model: None)
                    log.info("loaded %s", lane.host.name)
                    pause_s = _TICK_S
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # After any error the next attempt may succeed.
                    is_lasting = isinstance(error, RagDemoError) and not lane.has_loaded
                    if is_lasting and not isinstance(error, PostgresError):
                        self.failure = error
                        return
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    log_error(f"cannot load, next attempt in {pause_s:.0f} s", error)
            await asyncio.sleep(pause_s)

    @property
    def is_in_use(self) -> bool:
        """Whether a load or a call still runs."""
        found = [lane.host.status() for lane in self.lanes.values()]
        return any(each.leases or each.state == "loading" for each in found)

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
        for name, lane in self.lanes.items():
            if lane.error is not None:
                return public_reason(lane.error)
            if not lane.has_loaded:
                return f"the {name} is being loaded"
        if self.index.is_database:
            try:
                state = await self.index.host.call(lambda _: self.index.look())
            except RagDemoError as error:
                log.warning("not ready: %s", error)
                return public_reason(error)
            self.index.set_state(*state)
        return ""

    def state(self, **more: Any) -> dict[str, Any]:
        """Return the number of documents and the version of the index, with more fields."""
        return {**more, "documents": self.index.documents, "index_version": self.index.version}

    def deadline(self) -> float:
        """Return when the answer to a request that arrives now is due, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.timeout

    async def run_counted(
        self,
        request: Request,
        lane: str,
        compute: Callable[..., Any],
        texts: Sequence[str],
        deadline: float | None = None,
        *,
        more: int = 0,
        truncate: bool = True,
    ) -> tuple[list[Any], int, int]:
        """Run a job whose function gives a result and the number of tokens of each text.

        Args:
            request: See `Lane.run`.
            lane: "model" or "reranker".
            compute: See `Job`.
            texts: The texts.
            deadline: See `Lane.run`; by default ``timeout`` from now.
            more: Tokens that are read with each text.
            truncate: Whether to cut off texts that are too long. Otherwise they are refused.

        Returns:
            The results, the number of tokens that were read, and how many texts were cut off.
        """
        chosen = self.lanes[lane]
        limit = chosen.max_tokens
        tokens_of = (count + more for count in estimate(texts, limit))
        job = Job(compute, texts, [min(count, limit or count) for count in tokens_of])
        rows = await chosen.run(request, job, deadline or self.deadline())
        most = chosen.max_tokens or max(count for _, count in rows)
        truncated = sum(count > most for _, count in rows)
        if truncated and not truncate:
            detail = f"{truncated} texts are longer than the {most} tokens that the model reads"
            raise Problem(413, f"{detail}; shorten them or set truncate to true", param="input")
        tokens = sum(min(count, most) for _, count in rows)
        metrics.TOKENS.inc(tokens)
        metrics.TRUNCATED.inc(truncated)
        return [result for result, _ in rows], tokens, truncated

    async def change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        """Change the index and save it; see `Index.change`. It goes on without the client.

        Raises:
            Problem: The deadline has passed; the change is then either saved or not.
        """
        changing = self._start(self.index.change(change, deadline))
        left_s = deadline - asyncio.get_running_loop().time()
        if (await asyncio.wait({changing}, timeout=max(0.0, left_s)))[0]:
            return changing.result()
        changing.add_done_callback(lambda task: task.cancelled() or task.exception())  # is seen
        raise overloaded(5, "the change takes too long; it may still be saved", status=504)

    async def unload(self, name: str) -> dict[str, Any]:
        """Unload a model or the index.

        Returns:
            The report of the release.

        Raises:
            Problem: The name is unknown, or the model is in use.
        """
        found = [each.host for each in self.lanes.values() if each.host.name == name]
        if not found:
            raise Problem(404, "unknown model; see /admin/models")
        try:
            if found[0].state == "loading":  # The unload would wait for it.
                raise ModelInUseError
            report = await asyncio.to_thread(found[0].unload)
        except ModelInUseError:
            raise Problem(409, "the model is in use; try again") from None
        counts = {"still_held": len(report.still_held), "errors": len(report.errors)}
        return {**counts, **{field: getattr(report, field) for field in _REPORTED}}


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
