"""Service: the state that all routes share. It runs jobs, reloads, and changes the index."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request
from starlette.convertors import PathConvertor, register_url_convertor

from rag_demo.errors import IndexChangedError, PostgresError, RagDemoError, WriterBusyError
from rag_demo.places import load_manifest, make_retriever, open_indexes
from rag_demo.service import metrics
from rag_demo.service.lane import Job, Lane
from rag_demo.service.logs import log_error
from rag_demo.service.models import (
    Hosted,
    LoadModel,
    estimate,
    load_checked,
    load_model,
    load_reranker,
)
from rag_demo.service.responses import Problem, overloaded, public_reason
from rag_demo.service.settings import Limits, Settings, read_tokens
from torch_utils import ModelHost, ModelInUseError

log = logging.getLogger("rag_demo.service")
_TICK_S = 0.5
_LONGEST_PAUSE_S = 30.0  # between two loads that fail
_LOOK_S = 10.0  # between looks at the files of tokens
_FRESH_S = 0.5  # A search waits so long for a new version, then it uses the old one.
_PAUSE_S = 0.2  # between two attempts to change the index
_REPORTED = ("freed_bytes", "returned_bytes", "duration_s")  # Holders may be files of the server.


class Service:
    """A running service: the models and the index with their lanes. Belongs to one event loop.

    Nothing is loaded until it is used, and `start` keeps it loaded.

    Args:
        settings: The service's settings.
        limits: The service's limits.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        lanes: The lanes of "model", "reranker" (if there is one) and "index".
        documents: How many documents the index has.
        version: A name for its state.
        databases: The open stores in databases.
        identity: The model that made the index.
        draining: Whether the service is stopping.
        failure: Why the first load failed, if only a person can repair that.

    Raises:
        RagDemoError: There is no index, or it is damaged or empty.
    """

    def __init__(self, settings: Settings, limits: Limits, load: LoadModel | None = None) -> None:
        made_by = load_manifest(settings.index[0]).model
        if made_by is None:
            raise RagDemoError("the index is empty; add documents to it with: rag-demo add")
        self.settings, self.limits, self.tokens = settings, limits, read_tokens(settings)
        self.identity, self.databases = made_by, list[Any]()
        self.draining = False
        self.failure: Exception | None = None
        self._set_state(*self._look())
        self._stamp = self._read_stamp()
        self.model_id = settings.model or made_by.name
        device, trust = settings.device, settings.trust_remote_code
        options: Any = {"keep_alive": settings.keep_alive, "isolation": settings.isolation}
        if settings.isolation == "process":
            options["call_timeout_s"] = settings.hang_timeout
        if load is None:
            load = partial(load_model, self.model_id, device, made_by.dtype, trust)
        name = settings.served_model_name or Path(self.model_id).name  # Without folders.
        self.model_name = "model" if name in ("", "index") else name
        load = partial(load_checked, load, made_by)
        self.model = Hosted(ModelHost(load, name=self.model_name, **options))
        hosted = {"model": self.model}
        if settings.reranker is not None:
            load = partial(load_reranker, settings.reranker, device, trust)
            host = ModelHost(load, name=Path(settings.reranker).name, **options)
            hosted["reranker"] = Hosted(host)
        # The index is mapped from its files, so an idle index costs little.
        self._index = Hosted(ModelHost(self._open, name="index", keep_alive=-1))
        hosted["index"] = self._index
        for figure in metrics.POOL_FIGURES:
            metrics.POOL.labels(figure).set_function(partial(self._pool, figure))
        self._loop, self._changing = asyncio.get_running_loop(), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lanes = {name: Lane(name, each, settings) for name, each in hosted.items()}
        for each in hosted.values():
            self.start(self._keep_loaded(each))
        self.start(self._watch())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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

    @property
    def is_in_use(self) -> bool:
        """Whether a load or a call still runs."""
        found = [lane.hosted.host.status() for lane in self.lanes.values()]
        return any(each.leases or each.state == "loading" for each in found)

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
        return {**more, "documents": self.documents, "index_version": self.version}

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
            if lane.hosted.error is not None:
                return public_reason(lane.hosted.error)
            if not lane.hosted.has_loaded:
                return f"the {name} is being loaded"
        if self.databases:
            try:
                self._set_state(*await self._index.call(lambda _: self._look()))
            except RagDemoError as error:
                log.warning("not ready: %s", error)
                return public_reason(error)
        return ""

    async def _keep_loaded(self, hosted: Hosted) -> None:
        """Load the model, and retry after failures: an unready service gets no requests."""
        pause_s = _TICK_S
        while True:
            if hosted.error is not None or not hosted.has_loaded:
                try:
                    await hosted.call(lambda model: None)
                    log.info("loaded %s", hosted.host.name)
                    pause_s = _TICK_S
                except Exception as error:  # After any error the next attempt may succeed.
                    is_lasting = isinstance(error, RagDemoError) and not hosted.has_loaded
                    if is_lasting and not isinstance(error, PostgresError):
                        self.failure = error
                        return
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    log_error(f"cannot load, next attempt in {pause_s:.0f} s", error)
            await asyncio.sleep(pause_s)

    async def _watch(self) -> None:
        """Read the files of tokens again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.tokens = read_tokens(self.settings)
            except RagDemoError as error:
                log.error("the old tokens stay in use: %s", error)

    def _look(self) -> tuple[int, str]:
        """Read the number of documents and the version from the folders and databases."""
        manifests = [load_manifest(place) for place in self.settings.index]
        return sum(each.count for each in manifests), ", ".join(each.commit for each in manifests)

    def _set_state(self, documents: int, version: str) -> None:
        self.documents, self.version = documents, version
        metrics.DOCUMENTS.set(documents)
        metrics.INDEX_VERSION.clear()
        metrics.INDEX_VERSION.labels(version).set(1)

    def _read_stamp(self) -> list[Any]:
        """Return what differs after another process has changed a folder. Costs a few stats."""
        found: list[Any] = []
        for place in self.settings.index:
            # A folder or a file may be missing for a moment; that is a change too.
            with contextlib.suppress(OSError):
                for entry in os.scandir(place) if isinstance(place, Path) else ():
                    status = entry.stat()
                    found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return sorted(found)

    def _open(self) -> Any:
        settings = self.settings
        # A retriever gets the vectors of documents and queries from the queue.
        model = SimpleNamespace(
            identity=self.identity, dimension=None, embed_query=None, embed_documents=None
        )
        with contextlib.ExitStack() as stack:
            state = self._look()  # Before: the folders may change meanwhile.
            make = partial(make_retriever, settings.retriever, model, settings.device)
            retriever = open_indexes(settings.index, model, make, stack, check=True)
            stores = [each.store for each in _shards_of(retriever)]
            self.databases = [store for store in stores if hasattr(store, "url")]
            self._set_state(*state)
            stack.pop_all()
        return retriever

    def _folders(self, retriever: Any) -> Iterator[tuple[Any, Path]]:
        """Yield the retrievers of folders with them; a database is its own state."""
        for shard, place in zip(_shards_of(retriever), self.settings.index, strict=True):
            if isinstance(place, Path):
                yield shard, place

    def _load(self, check: bool, retriever: Any) -> None:
        state = self._look()
        for shard, place in self._folders(retriever):
            shard.load(place, check=check)
        self._set_state(*state)

    def _save(self, change: Callable[[Any], Any], retriever: Any) -> Any:
        if result := change(retriever):  # Otherwise nothing was deleted.
            for shard, place in self._folders(retriever):
                shard.save(place)
            self._set_state(*self._look())
        return result

    def _pool(self, figure: str) -> int:
        return sum(each.pool_stats().get(figure, 0) for each in self.databases)

    def search(
        self, options: dict[str, Any], index: Any, inputs: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        """Return the results of queries with vectors; the mode bm25 needs no vectors."""
        self._refresh()
        queries, vectors = zip(*inputs, strict=True)
        known = None if options["mode"] == "bm25" else np.stack(vectors)
        found: list[Any] = index.search_batch(queries, **options, vectors=known)
        return found

    def get(self, index: Any, ids: Sequence[str]) -> list[Any]:
        """Return the document of each id, or None."""
        self._refresh()
        found: list[Any] = index.get(ids)
        return found

    def page(self, index: Any, inputs: Sequence[tuple[int, str | None]]) -> list[Any]:
        """Return a page of documents for each limit and last id."""
        self._refresh()
        return [index.documents(after=after, limit=limit) for limit, after in inputs]

    def _refresh(self) -> None:
        """Open a new version of the index that another process has written. Runs in a thread.

        A version that cannot be opened is tried again after the next change.
        """
        stamp = self._read_stamp()
        if stamp != self._stamp and not self.draining:
            self._stamp = stamp
            opening = asyncio.run_coroutine_threadsafe(self._open_new(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                opening.result(_FRESH_S)

    async def _open_new(self) -> None:
        try:
            found = await self._index.call(lambda _: self._look())
            if found[1] != self.version:
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
                await self._index.call(partial(self._load, True))
            except Exception as error:  # After any error of the new index the old one still works.
                log_error("reload failed, the old index stays in use", error)
                reason = public_reason(error)
                raise Problem(409, f"{reason}; the old index is still in use") from None
        log.info("reloaded: %d documents", self.documents)

    async def unload(self, name: str) -> dict[str, Any]:
        """Unload a model or the index.

        Returns:
            The report of the release.

        Raises:
            Problem: The name is unknown, or the model is in use.
        """
        found = [each.hosted for each in self.lanes.values() if each.hosted.host.name == name]
        if not found:
            raise Problem(404, "unknown model; see /admin/models")
        try:
            if found[0].is_loading:  # The unload would wait for it.
                raise ModelInUseError
            report = await asyncio.to_thread(found[0].host.unload)
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
        changing = self.start(self._change(change, deadline))  # Goes on without the client.
        left_s = deadline - asyncio.get_running_loop().time()
        if (await asyncio.wait({changing}, timeout=max(0.0, left_s)))[0]:
            return changing.result()
        raise overloaded(5, "the change takes too long; it may still be saved", status=504)

    async def _change(self, change: Callable[[Any], Any], deadline: float) -> Any:
        async with self._changing:
            while True:
                try:
                    return await self._index.call(partial(self._save, change))
                except PostgresError:  # A transaction was rolled back.
                    raise
                except (TypeError, ValueError) as error:  # The client's documents are invalid.
                    raise Problem(422, str(error)[:500], param="documents") from None
                except Exception as error:  # From the disk, or another process is changing it.
                    # It must match its files again. Their content is checked by the next search.
                    await self._index.call(partial(self._load, False))
                    if not isinstance(error, (IndexChangedError, WriterBusyError)):
                        log_error("the index cannot be changed", error)
                        detail = "the index cannot be changed; the service's log says why"
                        raise Problem(409, detail) from None
                if asyncio.get_running_loop().time() > deadline - _PAUSE_S:
                    raise overloaded(5, "another process is changing the index", status=503)
                await asyncio.sleep(_PAUSE_S)


def _shards_of(retriever: Any) -> list[Any]:
    """Return the retrievers of several indexes, or the only one."""
    return getattr(retriever, "shards", [retriever])


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
