"""What holds memory in a service: a route behind a token, and a line in the log."""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator

from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import PlainTextResponse

from torch_utils import LiveMemory, live_memory

log = logging.getLogger("memory")
TOKEN = os.environ.get("DEBUG_TOKEN", "")
EVERY_S = float(os.environ.get("DEBUG_MEMORY_EVERY_S", "600"))


async def log_growth(first: LiveMemory) -> None:
    """Log every few minutes what is new since the start, with its holders, in a thread."""
    while True:
        await asyncio.sleep(EVERY_S)
        now = await asyncio.to_thread(live_memory)
        grown = now.since(first)  # Not since the last time: that would never show a slow leak.
        if grown.entries:
            log.warning("new memory: %s", await asyncio.to_thread(str, grown))


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    first = await asyncio.to_thread(live_memory)
    task = asyncio.create_task(log_growth(first))
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.get("/debug/memory", response_class=PlainTextResponse)
def debug_memory(authorization: str = Header("")) -> str:
    """Show the census. It names variables and files of the program, so it is not for everybody."""
    if not TOKEN or not secrets.compare_digest(authorization, f"Bearer {TOKEN}"):
        raise HTTPException(401)
    return str(live_memory())
