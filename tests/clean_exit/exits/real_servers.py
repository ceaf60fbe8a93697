"""Servers: uvicorn, gunicorn, celery. On loopback, at any free port."""

from __future__ import annotations

from typing import Any

from tests.clean_exit.exits.real_programs import DIRTY, INT, TERM, Program, dirty

ASGI = """
from contextlib import asynccontextmanager

async def app(scope, receive, send):
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
"""
# After TERM uvicorn dies of it as soon as the server has stopped: atexit callbacks do not run.
DIRTY_ASGI = DIRTY + ASGI + "    Held()\n"
WSGI = """
def app(environ, start_response):
    start_response("200 OK", [])
    return [b"x"]
"""
AT_EXIT = "\natexit.register(lambda: 1 / 0)\n"
HELD = "\nheld = Held()\n"


def uvicorn(name: str, *options: str, app: str = ASGI, **more: Any) -> Program:
    command = ("uvicorn", "app:app", "--host", "127.0.0.1", "--port", "0", *options)
    more["options"] = {**more["options"], "stop_when": "Application startup complete"}
    return Program("uvicorn", name, command, {"app.py": app}, modules=("uvicorn",), **more)


UVICORN = [
    uvicorn("term", options=TERM),
    uvicorn("int", options=INT),
    uvicorn("workers-term", "--workers", "2", options=TERM),
    uvicorn("dirty-destructor", app=ASGI + DIRTY + HELD, options=INT, **dirty("unraisable")),
    uvicorn(
        "dirty-in-workers",
        *("--workers", "2"),
        app=DIRTY_ASGI,
        options=TERM,
        **dirty("unraisable"),
    ),
]


def gunicorn(name: str, *options: str, app: str = WSGI, **more: Any) -> Program:
    command = ("gunicorn", "-b", "127.0.0.1:0", "--graceful-timeout", "10", *options, "app:app")
    more["options"] = {**more["options"], "stop_when": "Booting worker"}
    return Program("gunicorn", name, command, {"app.py": app}, modules=("gunicorn",), **more)


GUNICORN = [
    gunicorn("workers-term", "-w", "2", options=TERM),
    gunicorn("dirty-in-worker", app=WSGI + DIRTY + AT_EXIT, options=TERM, **dirty("atexit-error")),
]

CELERY_APP = """
from celery import Celery
app = Celery("app", broker="memory://", backend="cache+memory://")
"""


def celery(name: str, pool: str, app: str = CELERY_APP, **more: Any) -> Program:
    command = ("celery", "-A", "app", "worker", "-P", pool, "-c", "2", "-l", "INFO")
    more["options"] = {**more["options"], "stop_when": "ready\\.", "max_shutdown_s": 30}
    # As root it warns, and goes on.
    return Program("celery", name, command, {"app.py": app}, modules=("celery",), **more)


CELERY = [
    celery("prefork-term", "prefork", options=TERM),
    celery("threads-term", "threads", options=TERM),
    celery(
        "dirty-atexit",
        "solo",
        CELERY_APP + DIRTY + AT_EXIT,
        options=TERM,
        **dirty("atexit-error"),
    ),
]

SERVERS = [*UVICORN, *GUNICORN, *CELERY]
