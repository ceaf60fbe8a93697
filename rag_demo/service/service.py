"""Service: the state that all routes share. It answers requests, reloads and unloads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Request

from rag_demo.errors import IndexFileError, ModelError, ModelMismatchError, RagDemoError
from rag_demo.retriever import LocalRetriever
from rag_demo.service.batcher import Batcher, Job
from rag_demo.service.engine import Engine, LoadModel
from rag_demo.service.problems import Problem
from rag_demo.service.settings import Settings
from rag_demo.service.threads import DaemonThread
from rag_demo.stores.index_format import read_manifest
from torch_utils import CleanupReport, ModelInUseError, memory_snapshot
from torch_utils.report import format_bytes

log = logging.getLogger("rag_demo.service")
_SAMPLE_S = 1.0
_SAMPLES = 300
_EVENTS = 50
_LONGEST_RETRY_S = 30.0


class Service:
    """A running service. Belongs to one event loop.

    Args:
        settings: The service's settings.
        load: Loads the embedding model; None for the model that the settings or the index name.

    Attributes:
        draining: Whether the service is stopping.
        on_reload: Called after a reload by ``/admin/reload``.
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
        """Load the models, open the index and start to answer requests.

        Raises:
            RagDemoError: A model cannot be loaded, or the index cannot be opened.
        """
        self.engine = Engine(self.settings, self._load)
        await self._thread.call(self.engine.open)
        self.batcher = Batcher(lambda: self.engine, self.settings.limits)
        self.start(self._sample())
        self.start(self._load_again())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background, at most until `close`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish the queue, then close the engine; do not wait for a call that hangs."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        is_idle = await self.batcher.close()
        closing = DaemonThread("rag_demo.closing")  # A load may hang in the other thread.
        try:
            await closing.call(self.engine.close, 30.0 if is_idle else 0.0)
        except ModelInUseError as error:
            log.error("a call of the model hangs and cannot be ended: %s", error)
            return
        finally:
            self._thread.stop()
            closing.stop()
        log.info("stopped: the models and the index are closed")

    def parts(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        """Split texts into batches, so that other requests get their turn in between."""
        size = self.settings.limits.batch_texts
        return (texts[start : start + size] for start in range(0, len(texts), size))

    async def run(self, request: Request, jobs: Iterable[Job]) -> list[Any]:
        """Run the jobs of a request one after the other; see `Batcher.run`.

        Returns:
            The answers for the texts of all jobs.
        """
        deadline = asyncio.get_running_loop().time() + self.settings.limits.answer_s
        answers: list[Any] = []
        for number, job in enumerate(jobs):
            is_continuation = number > 0
            answers += await self.batcher.run(request, job, deadline, is_continuation)
        return answers

    async def not_ready(self) -> str:
        """Return why requests cannot be answered; "" if they can."""
        if self.draining:
            return "the service is stopping"
        if reason := self.batcher.failure:
            log.warning("not ready: %s", reason)
            return reason
        error = self.engine.embedder.error
        if error is None and self.engine.index.status().state != "loaded":
            try:
                await self._thread.call(read_manifest, self.settings.index)
            except RagDemoError as facts_error:
                error = facts_error
        if error is None:
            return ""
        log.warning("not ready: %s", error)
        return _public_reason(error)

    async def _load_again(self) -> None:
        """Retry a load that failed: an unready service gets no requests, which would retry it."""
        wait_s = _SAMPLE_S
        while True:
            await asyncio.sleep(wait_s)
            if self.engine.embedder.error is None:
                wait_s = _SAMPLE_S
                continue
            try:
                await self._thread.call(self.engine.embedder.ensure_loaded)
                log.info("the model is loaded again")
            except Exception as error:  # After any error of a load the next attempt may succeed.
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
                log.error("the model cannot be loaded, next attempt in %g s: %s", wait_s, error)

    async def reload(self) -> dict[str, Any]:
        """Open the index again. The old one answers until the new one is open.

        Returns:
            The number of documents now and before, the duration in seconds, and the process.

        Raises:
            Problem: The new index cannot be opened; the old one stays in use.
        """
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            engine = await self._thread.call(self.engine.reopened)
        except Exception as error:
            # After any error of the new index the old one still works.
            log.error("reload failed, the old index stays in use: %s", error, exc_info=error)
            raise Problem(409, f"{_public_reason(error)}; the old index is still in use") from None
        old, self.engine = self.engine, engine
        await self.batcher.between_batches(old.index.close)
        self.history.add_event("reload", "index")
        seconds = time.perf_counter() - started
        log.info(
            "reloaded: %d documents, %d before, in %.1f s", engine.documents, old.documents, seconds
        )
        counts = {"documents": engine.documents, "documents_before": old.documents}
        return {**counts, "duration_s": seconds, **self.process}

    async def reload_on_signal(self) -> None:
        """Reload once more after the current reload, however many signals arrive meanwhile."""
        if self._reload_queued:
            return
        self._reload_queued = True
        async with self._reloading:
            self._reload_queued = False
            with contextlib.suppress(Problem):  # It is in the log.
                await self._reload()

    async def unload(self, name: str) -> dict[str, Any]:
        """Unload a model or the index between two batches.

        Returns:
            The report of the release.

        Raises:
            Problem: The name is unknown, or the model is in use.
        """

        def unload() -> CleanupReport:
            hosts = self.engine.hosts
            if name not in hosts:
                raise Problem(404, f"unknown model; available: {', '.join(hosts)}")
            return hosts[name].unload()

        self.history.samples.append(self.history.sample(self.engine))
        try:
            report = await self.batcher.between_batches(unload)
        except ModelInUseError:
            raise Problem(409, "the model is in use; try again") from None
        self.history.samples.append(self.history.sample(self.engine))
        answer = {**_public_report(report), **self.process}
        if self.settings.workers > 1:
            answer["summary"] += f", in one of {self.settings.workers} processes"
        return answer

    async def change(self, change: Callable[[LocalRetriever], Any]) -> Any:
        """Change the index and save it between two batches.

        Returns:
            The result of ``change``.

        Raises:
            Problem: The index cannot be changed or saved; the old index stays in use.
        """
        async with self._reloading:
            try:
                return await self.batcher.between_batches(lambda: self.engine.change(change))
            except Problem:
                raise
            except (TypeError, ValueError) as error:  # The client's documents are invalid.
                raise Problem(422, str(error)[:500], param="documents") from None
            except Exception as error:  # From the model or the disk.
                log.error("the index cannot be changed: %s", error, exc_info=error)
                raise Problem(
                    409, "the index cannot be changed; the service's log says why"
                ) from None

    @property
    def process(self) -> dict[str, int]:
        """The id of this process and the number of workers."""
        return {"process": os.getpid(), "workers": self.settings.workers}

    def memory(self) -> dict[str, Any]:
        """Return samples of the memory, with loads, unloads and the number of documents."""
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


class History:
    """Samples of the memory, and events; oldest first."""

    def __init__(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._counts: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # by host

    def add_event(self, what: str, model: str) -> None:
        """Record an event at the current time."""
        self.events.append({"at": round(time.time(), 3), "what": what, "model": model})

    def sample(self, engine: Engine) -> dict[str, Any]:
        """Return the memory now; record the loads and unloads since the last sample."""
        models, elsewhere = {}, 0
        for name, host in engine.hosts.items():
            status = host.status()
            loads, unloads = self._counts.get(host, (0, 0))
            if status.loads > loads:
                self.add_event("load", name)
            if status.unloads > unloads:
                self.add_event("unload", name)
            self._counts[host] = status.loads, status.unloads
            models[name] = status.state
            if host.isolation == "process":
                elsewhere += status.nbytes
        now = memory_snapshot()
        devices = {name: memory.reserved_bytes for name, memory in now.devices.items()}
        at, host_bytes = round(time.time(), 3), now.host.rss_bytes + elsewhere
        return {"at": at, "host": host_bytes, "devices": devices, "models": models}


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.state.service
    return service


def _public_reason(error: BaseException) -> str:
    """Return the reason of an error without names of files of the server."""
    if isinstance(error, ModelMismatchError):
        return "the index was made with another model"
    if isinstance(error, IndexFileError):
        return "the index is missing or damaged"
    if isinstance(error, ModelError):
        return "the model cannot be loaded"
    return "the model or the index cannot be opened"


def _public_report(report: CleanupReport) -> dict[str, Any]:
    """Return a report without the names of holders, which may be files of the server."""
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
