"""A FastAPI service with a model on demand. In this folder: uvicorn fastapi_service:app"""

import asyncio
import contextlib
import queue
import threading
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, Request
from torch import nn

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from tests.examples.applications.models import Ranker, Tagger
from torch_utils import ModelHost
from torch_utils.fastapi import lifespan

facts: dict[str, float] = {"closed": 0, "beats": 0, "events": 0}
weights: list[Storages] = []
events: "queue.Queue[str | None]" = queue.Queue()
torch.manual_seed(0)
tagger = Tagger(nn.Embedding(1000, 1024))


def count_close() -> None:
    facts["closed"] += 1


def load_ranker() -> Ranker:
    torch.manual_seed(1)
    ranker = Ranker(tagger.embeddings, count_close)
    weights.append(Storages(ranker.layers.parameters()))
    return ranker.eval()


async def beat() -> None:
    while True:
        facts["beats"] += 1
        await asyncio.sleep(0.02)


def write_events() -> None:
    for _ in iter(events.get, None):
        facts["events"] += 1


@asynccontextmanager
async def background(app: FastAPI):
    writer = threading.Thread(target=write_events)
    writer.start()
    heartbeat = asyncio.create_task(beat())
    settle()
    facts["before_mb"] = anonymous_mb()
    yield
    heartbeat.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await heartbeat
    events.put(None)
    await asyncio.to_thread(writer.join)
    tell(stopped=measured())


@lifespan(around=background, deadline_s=60)
async def models(app: FastAPI, scope):
    yield {"host": scope.manage(ModelHost(load_ranker, keep_alive="10m"))}


app = FastAPI(lifespan=models)


def measured() -> dict[str, float]:
    alive = sum(each.alive_mb() for each in weights)
    return {**facts, "alive_mb": alive, "grown_mb": anonymous_mb() - facts["before_mb"]}


@app.post("/rank")
async def rank(words: list[int], request: Request) -> list[float]:
    events.put("rank")
    async with request.state.host.alease(timeout_s=60) as ranker:
        return (await asyncio.to_thread(ranker, torch.tensor(words))).tolist()


@app.post("/tag")
def tag(words: list[int]) -> list[list[float]]:
    events.put("tag")
    return tagger(torch.tensor(words)).tolist()


@app.post("/unload")
def unload(request: Request) -> dict[str, float]:
    request.state.host.unload()
    return measured()
