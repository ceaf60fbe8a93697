"""Tests of the lifespan with a scope."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, call-overload, misc, union-attr"

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clean_exit import check
from tests.support.programs import IMPORT_PATH, assert_clean, run_forked
from torch_utils import ModelHost, Resource, SafePyTorchCleanup
from torch_utils.fastapi import lifespan


class Model(Resource):
    """Records when it is closed, and in which thread."""

    def __init__(self, name: str, closed: list[Any]) -> None:
        self.name, self.log = name, closed

    def _release(self) -> None:
        self.log.append((self.name, threading.current_thread()))


def serve(enter: Callable[[Any], Any], body: Callable[[Any], Any] | None = None) -> Any:
    """Enter, serve and leave in a new event loop, like a server."""

    async def main() -> Any:
        async with enter("the app") as state:
            if body is not None:
                await body(state)
            return state

    return asyncio.run(main())


def test_lifespan_closes_in_reverse_order_in_another_thread_or_the_loop() -> None:
    """Callbacks that are coroutines run in the loop."""
    closed: list[Any] = []

    async def closer(name: str) -> None:
        await asyncio.sleep(0)
        closed.append((name, threading.current_thread()))

    @lifespan
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[dict[str, Any]]:
        assert app == "the app"
        scope.manage(Model("first", closed))
        scope.callback(closer, "callback")
        scope.manage("an object", close=closer)
        yield {"model": scope.manage(Model("second", closed))}

    assert serve(models)["model"].closed
    assert [name for name, _ in closed] == ["second", "an object", "callback", "first"]
    in_main = [thread is threading.main_thread() for _, thread in closed]
    assert in_main == [False, True, True, False]


@pytest.mark.slow
def test_hanging_callback_is_logged_and_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    let_go = threading.Event()

    def hangs_for_ever() -> None:
        let_go.wait()

    @lifespan(deadline_s=3.0)
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[None]:
        scope.callback(hangs_for_ever)
        yield

    async def cancel(state: Any) -> None:
        asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)

    with pytest.raises(asyncio.CancelledError):  # While it waits for the callback.
        serve(models, cancel)
    let_go.set()
    assert "exceeded 3 s and was abandoned; stack of its thread:" in caplog.text
    assert "let_go.wait()" in caplog.text


@pytest.mark.slow
def test_lease_that_stays_open_leaves_time_to_close_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[Any] = []
    host = ModelHost(lambda: [1], name="lent")
    lease = host.lease()

    @lifespan(deadline_s=3.0)
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[None]:
        scope.manage(Model("older", closed))
        scope.manage(host)
        lease.__enter__()
        yield

    serve(models)
    assert [name for name, _ in closed] == ["older"]
    assert "lent" in caplog.text and "was abandoned" not in caplog.text
    lease.__exit__(None, None, None)


@pytest.mark.parametrize("starts", [True, False])
def test_exception_of_the_application_wins_and_everything_is_closed(starts: bool) -> None:
    """One of the startup, or one that comes after the server has stopped."""
    closed: list[Any] = []

    def fails() -> None:
        raise OSError("cannot close")

    @lifespan
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[None]:
        scope.manage(Model("one", closed))
        scope.callback(fails)
        if starts:
            yield
        raise ValueError("of the application")

    with pytest.raises(ValueError, match="of the application") as caught:
        serve(models)
    assert [name for name, _ in closed] == ["one"]
    assert any("cannot close" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("decorate", [lambda function: function, asynccontextmanager])
def test_existing_lifespan_is_wrapped(decorate: Callable[[Any], Any]) -> None:
    ends: list[Any] = []

    @decorate
    async def existing(app: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"pool": "theirs", "both": "theirs"}
        ends.append(("theirs", None))

    @lifespan(around=existing)
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[dict[str, Any]]:
        scope.manage(Model("ours", ends))
        yield {"both": "ours"}

    assert serve(models) == {"pool": "theirs", "both": "ours"}
    assert [name for name, _ in ends] == ["ours", "theirs"]


def test_close_in_a_cancelled_scope_does_not_spin() -> None:
    """anyio cancels the wait again and again; the loop goes on meanwhile."""
    anyio = pytest.importorskip("anyio")
    turns, closed = list[int](), list[Any]()

    @lifespan
    async def models(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[None]:
        scope.manage(Model("older", closed))
        scope.callback(time.sleep, 0.3)
        yield

    def turn(loop: asyncio.AbstractEventLoop) -> None:
        turns.append(1)
        if not closed:
            loop.call_soon(turn, loop)

    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with models("the app"):
                scope.cancel()
                turn(asyncio.get_running_loop())

    asyncio.run(main())
    assert [name for name, _ in closed] == ["older"]
    assert 3 < len(turns) < 1000


def test_wrong_arguments_are_refused() -> None:
    for wrong in (-1, float("inf"), float("nan"), "10", None):
        with pytest.raises((TypeError, ValueError), match=r"deadline_s must be .* seconds.*, got"):
            lifespan(deadline_s=wrong)
    for function in ("app", asyncio.sleep, asynccontextmanager(serve)):
        with pytest.raises(TypeError, match="yields once, got"):
            lifespan(function)


APPLICATION = """
import os, signal
from starlette.applications import Starlette
from torch_utils.fastapi import lifespan

@lifespan(deadline_s=60)
async def models(app, scope):
    for name in ("older", "newer"):
        scope.manage(name, close=lambda name: print("released", name, flush=True))
    if os.environ["AGAIN"]:  # A second Ctrl-C, while things are being closed.
        scope.callback(os.kill, os.getpid(), signal.SIGINT)
    yield

app = Starlette(lifespan=models)
"""


@pytest.mark.parametrize("again", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_server_that_is_interrupted_releases_its_models_once(again: str, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    (tmp_path / "application.py").write_text(APPLICATION)
    report = check(
        [sys.executable, "-m", "uvicorn", "application:app", "--port", "0"],
        stop_signal=signal.SIGINT,
        stop_when="Application startup complete",
        timeout_s=300,
        max_shutdown_s=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{IMPORT_PATH}", "AGAIN": again},
        cwd=tmp_path,
    )
    assert report.stdout == "released newer\nreleased older\n", report.stderr
    assert report.clean or again, f"{report}\n{report.stderr}"


UNLOADS = """
import asyncio, torch
from torch_utils import ModelHost, memory_snapshot
from torch_utils.fastapi import lifespan

def load():
    return torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(15)])
def anonymous_mb():
    return memory_snapshot().host.anonymous_bytes / 1e6
@lifespan
async def models(app, scope):
    yield {"host": scope.manage(ModelHost(load))}
async def serve():
    async with models("the app") as state:
        host = state["host"]
        assert await host.call(lambda model: model(torch.ones(2, 1000)).shape) == (2, 1000)
        loaded_mb = anonymous_mb()
        assert host.unload().freed_bytes["host"] > 59e6
        assert loaded_mb - anonymous_mb() > 50, (loaded_mb, anonymous_mb())
        return anonymous_mb()

before_mb = asyncio.run(serve())  # It imports, and starts threads.
for use in range(3):
    unloaded_mb = asyncio.run(serve())
    assert unloaded_mb - before_mb < 10, (unloaded_mb, before_mb)
"""


def test_service_gives_its_memory_back_at_each_unload() -> None:
    assert_clean(run_forked(UNLOADS, quick_end=True))
