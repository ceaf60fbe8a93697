"""Service: what all routes share. Answers requests, reloads, unloads, and knows if it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request

from rag_demo.errors import IndexFileError, ModelError, ModelMismatchError, RagDemoError
from rag_demo.retriever import Retriever
from rag_demo.service.batcher import Batcher, Job
from rag_demo.service.engine import Engine, LoadModel
from rag_demo.service.history import History
from rag_demo.service.problems import Problem
from rag_demo.service.settings import Settings
from rag_demo.service.threads import DaemonThread
from rag_demo.store.facts import read_facts
from torch_utils import CleanupReport, ModelInUseError
from torch_utils.report import format_bytes

__all__ = ["Service", "service_of"]

log = logging.getLogger("rag_demo.service")
_SAMPLE_S = 1.0
_LONGEST_RETRY_S = 30.0


class Service:
    """A running service. Belongs to one event loop.

    Args:
        settings: The service's.
        load: Loads another embedding model than the one that the index names.

    Attributes:
        draining: Whether it is stopping.
        on_reload: Called when an administrator has had the index reloaded.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings, self._load = settings, load
        self.draining = False
        self.on_reload: Callable[[], None] = lambda: None
        self.history = History()
        self.engine: Engine
        self.batcher: Batcher
        self._reloading = asyncio.Lock()
        self._reload_queued = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = DaemonThread("rag_demo.administration")

    async def open(self) -> None:
        """Load the models, open the index and begin to answer.

        Raises:
            RagDemoError: Something cannot be opened.
        """

        def open_engine() -> Engine:
            engine = Engine(self.settings, self._load)
            engine.open()
            return engine

        self.engine = await self._thread.call(open_engine)
        self.batcher = Batcher(lambda: self.engine, self.settings.limits)
        self.start(self._sample())
        self.start(self._load_again())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside the requests, until the end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish the queue, then close the engine. Does not wait for a call that hangs."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        is_idle = await self.batcher.close()
        closing = DaemonThread("rag_demo.closing")  # The other one may be in a load that hangs.
        try:
            await closing.call(*((self.engine.close,) if is_idle else (self.engine.close, 0)))
        except ModelInUseError as error:
            log.error("a call of the model hangs and is left behind: %s", error)
            return
        finally:
            self._thread.stop()
            closing.stop()
        log.info("stopped: the model and the index were given back")

    def deadline(self) -> float:
        """Return when the answer to a request that comes now is due, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.limits.answer_s

    async def run(self, request: Request, job: Job) -> Any:
        """Do a job that is a whole request; see `Batcher.run`."""
        return await self.batcher.run(request, job, self.deadline())

    async def not_ready(self) -> str:
        """Return why requests cannot be answered; "" if they can."""
        if self.draining:
            return "the service is stopping"
        if reason := self.batcher.failure:
            log.warning("not ready: %s", reason)
        elif error := self.engine.embedder.error:
            log.warning("not ready: %s", error)
            reason = _public_reason(error)
        elif self.engine.index.status().state != "loaded":
            try:
                await self._thread.call(read_facts, self.settings.index)
            except RagDemoError as error:
                log.warning("not ready: %s", error)
                reason = "the index cannot be opened"
        return reason

    async def _load_again(self) -> None:
        """Load a model that could not be loaded again, until it can: no request would come."""
        wait_s = _SAMPLE_S
        while True:
            await asyncio.sleep(wait_s)
            if self.engine.embedder.error is None:
                wait_s = _SAMPLE_S
                continue
            try:
                await self._thread.call(self._lease_once)
                log.info("the model could be loaded again")
            except Exception as error:  # Whatever loading raises, the next attempt may succeed.
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
                log.error("the model cannot be loaded, next attempt in %g s: %s", wait_s, error)

    def _lease_once(self) -> None:
        with self.engine.embedder.lease():
            pass

    async def reload(self) -> dict[str, Any]:
        """Open the index as it is now. The old one answers until the new one can.

        Raises:
            Problem: It cannot be opened; the old one goes on answering.
        """
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            engine = await self._thread.call(self.engine.reopened)
        except Exception as error:
            # Whatever is wrong with the new index, the old one still works.
            log.error("reload failed, the old index goes on: %s", error, exc_info=error)
            raise Problem(409, f"{_public_reason(error)}; the old index is still in use") from None
        old, self.engine = self.engine, engine
        await self.batcher.between_batches(old.index.close)
        self.history.add_event("reload", "index")
        seconds = time.perf_counter() - started
        log.info(
            "reloaded: %d documents instead of %d, %.1f s", engine.documents, old.documents, seconds
        )
        counts = {"documents": engine.documents, "documents_before": old.documents}
        return {**counts, "duration_s": seconds, **self.process}

    async def reload_on_signal(self) -> None:
        """Reload; many signals at once cause the reload under way and one more."""
        if self._reload_queued:
            return
        self._reload_queued = True
        async with self._reloading:
            self._reload_queued = False
            with contextlib.suppress(Problem):  # The log has it.
                await self._reload()

    async def unload(self, name: str) -> dict[str, Any]:
        """Unload a model or the index between two batches.

        Returns:
            What came back.

        Raises:
            Problem: The name is unknown, or it is in use.
        """

        def unload() -> CleanupReport:
            hosts = self.engine.hosts
            if name not in hosts:
                raise Problem(404, f"unknown model; known are: {', '.join(hosts)}")
            return hosts[name].unload()

        self.history.samples.append(self.history.sample(self.engine))
        try:
            report = await self.batcher.between_batches(unload)
        except ModelInUseError:
            raise Problem(409, "it is in use at the moment; try again") from None
        self.history.samples.append(self.history.sample(self.engine))
        answer = {**_public_report(report), **self.process}
        if self.settings.workers > 1:
            answer["summary"] += f", in one of {self.settings.workers} processes"
        return answer

    async def change(self, change: Callable[[Retriever], Any]) -> Any:
        """Change the index and save it between two batches.

        Raises:
            Problem: It cannot be changed or saved; the old index goes on answering.
        """
        async with self._reloading:
            try:
                return await self.batcher.between_batches(lambda: self.engine.change(change))
            except Problem:
                raise
            except (TypeError, ValueError) as error:  # Of what the client sent.
                raise Problem(422, str(error)[:500], param="documents") from None
            except Exception as error:  # Whatever the model or the disk raises.
                log.error("the index cannot be changed: %s", error, exc_info=error)
                raise Problem(409, "the index cannot be changed; the log says why") from None

    @property
    def process(self) -> dict[str, int]:
        """Which process answers, of how many with a model and an index each."""
        return {"process": os.getpid(), "workers": self.settings.workers}

    def memory(self) -> dict[str, Any]:
        """Describe the memory now and in the last minutes."""
        return {
            "samples": [*self.history.samples, self.history.sample(self.engine)],
            "events": list(self.history.events),
            "documents": self.engine.documents,
            "draining": self.draining,
        }

    async def _sample(self) -> None:
        while True:
            self.history.samples.append(self.history.sample(self.engine))
            await asyncio.sleep(_SAMPLE_S)


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.state.service
    return service


def _public_reason(error: BaseException) -> str:
    """Return what is wrong, without the names of files of this machine."""
    if isinstance(error, ModelMismatchError):
        return "the index was made with another model"
    if isinstance(error, IndexFileError):
        return "the index is missing or damaged"
    if isinstance(error, ModelError):
        return "the model cannot be loaded"
    return "the model or the index cannot be opened"


def _public_report(report: CleanupReport) -> dict[str, Any]:
    """Return a report without holders, whose names may be files of this machine."""
    freed = ", ".join(f"{format_bytes(n)} on {d}" for d, n in report.freed_bytes.items() if n)
    return {
        "freed_bytes": dict(report.freed_bytes),
        "returned_bytes": dict(report.returned_bytes),
        "still_held": [
            {"what": held.what, "nbytes": held.nbytes, "device": held.device}
            for held in report.still_held
        ],
        "errors": len(report.errors),
        "duration_s": report.duration_s,
        "summary": f"freed {freed or 'nothing'} in {report.duration_s * 1e3:.1f} ms",
    }
