"""Running: one service at work: what answers, what is waited for, and how both are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rag_demo.errors import IndexFileError, ModelError, ModelMismatchError, RagDemoError
from rag_demo.service.batching import Batcher, Job
from rag_demo.service.opened import LoadModel, Opened
from rag_demo.service.problems import ClientGoneError, Problem, too_busy
from rag_demo.service.settings import Settings
from rag_demo.store.facts import read_facts
from torch_utils import CleanupReport, ModelInUseError, memory_snapshot
from torch_utils.report import format_bytes

__all__ = ["RELOADED", "SERVES", "Running", "Tell", "tell_nobody"]

log = logging.getLogger("rag_demo.service")
SERVES, RELOADED = "serves", "reloaded"
"""What a supervisor is told: that there are answers; that its other workers are to reload."""
Tell = Callable[[str], None]
_SAMPLES = 300
_SAMPLE_S = 1.0
_WATCH_S = 0.05
_EVENTS = 50


def tell_nobody(said: str) -> None:
    """Tell nobody: no supervisor started this."""


class Running:
    """One service at work. Made, used and closed in one event loop.

    Args:
        settings: The service's.
        load: Loads another embedding model than that which the index names.
    """

    def __init__(self, settings: Settings, load: LoadModel | None = None) -> None:
        self.settings, self._load = settings, load
        self.draining = False
        self.tell: Tell = tell_nobody
        self.opened: Opened
        self.batcher: Batcher
        self._reloading = asyncio.Lock()
        self._will_reload = False
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._seen: dict[str, tuple[int, int]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Open the index and begin to answer.

        Raises:
            RagDemoError: It cannot be opened.
        """
        self.opened = await asyncio.to_thread(self._open)
        self.batcher = Batcher(lambda: self.opened, self.settings.limits)
        self.start(self._sample())

    def _open(self) -> Opened:
        opened = Opened(self.settings, self._load)
        opened.open()
        return opened

    def start(self, coroutine: Any) -> None:
        """Run something beside the requests, until the end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Finish what was let in, then give everything back."""
        self.draining = True
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.batcher.close()
        await asyncio.to_thread(self.opened.close)
        log.info("stopped: the model and the index were given back")

    def deadline(self) -> float:
        """Return when an answer that is asked for now has to be there, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.limits.answer_s

    async def ask(
        self, request: Any, job: Job, *, is_more: bool = False, deadline: float | None = None
    ) -> Any:
        """Have a job done, as long as its client is there, within the time that there is.

        Args:
            request: Who asks.
            job: What is to be done.
            is_more: Whether it is a further part of what the client asked for.
            deadline: When all of that has to be done; by default its own time from now on.

        Raises:
            Problem: It took too long, too much waits, or it failed.
            ClientGoneError: The client has gone away.
        """
        work = asyncio.ensure_future(self.batcher.submit(job, is_more=is_more))
        gone = asyncio.ensure_future(_gone(request))
        limit_s = self.settings.limits.answer_s
        now = asyncio.get_running_loop().time()
        left_s = limit_s if deadline is None else max(0.0, deadline - now)
        try:
            await asyncio.wait({work, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise ClientGoneError
            raise too_busy(5, f"there was no answer within {limit_s:g} s", status=503)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def not_ready(self) -> str:
        """Say why the index cannot be searched; nothing, if it can."""
        if self.draining:
            return "the service is stopping"
        if self.opened.index.status().state == "loaded":
            return ""
        try:
            await asyncio.to_thread(read_facts, self.settings.index)
        except RagDemoError as error:
            log.warning("not ready: %s", error)
            return "the index cannot be opened"
        return ""

    async def reload(self) -> dict[str, Any]:
        """Open the index as it is now, with the same model; the old one answers until this one can.

        Raises:
            Problem: It cannot be opened, and the old one goes on answering.
        """
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            opened = await asyncio.to_thread(self.opened.reopened)
        except Exception as error:
            # Whatever is wrong with the new one, the old one is there.
            log.error("reload: the old index goes on: %s", error, exc_info=error)
            raise Problem(409, f"{_why(error)}; the old index goes on answering") from None
        before, self.opened = self.opened, opened
        documents, was = opened.documents, before.documents
        self._seen.pop("index", None)  # The new host has counts of its own.
        await self.batcher.between(before.index.close)
        self.events.append({"at": round(time.time(), 3), "what": "reload", "model": "index"})
        seconds = time.perf_counter() - started
        log.info("reloaded: %d documents instead of %d, %.1f s", documents, was, seconds)
        counts = {"documents": documents, "documents_before": was}
        return {**counts, "duration_s": seconds, **self.who_answers}

    async def reload_quietly(self) -> None:
        """Reload, for a signal, which nobody can be answered for; the log has what happened.

        Many signals at once are no more than two reloads: the one under way, and one after it.
        """
        if self._will_reload:
            return
        self._will_reload = True
        async with self._reloading:
            self._will_reload = False
            with contextlib.suppress(Problem):
                await self._reload()

    async def unload(self, name: str) -> dict[str, Any]:
        """Give a model, or the index, back, between two batches.

        Returns:
            The report of what came back.

        Raises:
            Problem: There is none of this name, or it is lent.
        """

        def unload() -> CleanupReport:  # Of those that are there when its turn has come.
            hosts = self.opened.hosts
            if name not in hosts:
                known = ", ".join(hosts)
                raise Problem(404, f"there is no model of this name; there are: {known}")
            return hosts[name].unload()

        self.samples.append(self._look())  # The picture shows the fall where it was.
        try:
            report = await self.batcher.between(unload)
        except ModelInUseError:
            raise Problem(409, "it is in use at the moment; try again") from None
        self.samples.append(self._look())
        answer = {**_report(report), **self.who_answers}
        if self.settings.workers > 1:
            answer["summary"] += f", in one of {self.settings.workers} processes"
        return answer

    @property
    def who_answers(self) -> dict[str, int]:
        """Which process this is, of how many that each have a model and an index."""
        return {"process": os.getpid(), "workers": self.settings.workers}

    def memory(self) -> dict[str, Any]:
        """Describe the memory now, and in the last minutes."""
        return {
            "samples": [*self.samples, self._look()],
            "events": list(self.events),
            "documents": self.opened.documents,
            "draining": self.draining,
        }

    async def _sample(self) -> None:
        while True:
            self.samples.append(self._look())
            await asyncio.sleep(_SAMPLE_S)

    def _look(self) -> dict[str, Any]:
        now = memory_snapshot()
        at = round(time.time(), 3)
        models, elsewhere = {}, 0
        for name, host in self.opened.hosts.items():
            status = host.status()
            counts = status.loads, status.unloads
            before = self._seen.get(name, (0, 0))
            for what, grown in zip(("load", "unload"), (0, 1), strict=True):
                if counts[grown] > before[grown]:
                    self.events.append({"at": at, "what": what, "model": name})
            self._seen[name] = counts
            models[name] = status.state
            if host.isolation == "process":
                elsewhere += status.nbytes
        devices = {name: memory.reserved_bytes for name, memory in now.devices.items()}
        host_bytes = now.host.rss_bytes + elsewhere
        return {"at": at, "host": host_bytes, "devices": devices, "models": models}


async def _gone(request: Any) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(_WATCH_S)


def _why(error: Exception) -> str:
    """Say what is wrong without saying where on this machine."""
    if isinstance(error, ModelMismatchError):
        return "the index was made with another model"
    if isinstance(error, IndexFileError):
        return "the index is missing or damaged"
    if isinstance(error, ModelError):
        return "the model cannot be loaded"
    return "the index cannot be opened"


def _report(report: CleanupReport) -> dict[str, Any]:
    """Write a report without the holders, whose names may be files of this machine."""
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
