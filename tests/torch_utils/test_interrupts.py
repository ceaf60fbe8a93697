"""Ctrl-C at any instruction: what was begun is finished, exactly once, and the caller is told."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import everywhere, run_interrupted
from torch import nn

from programs import assert_clean, run
from torch_utils import Resource, SafePyTorchCleanup, release
from torch_utils._registry import REGISTRY
from torch_utils._releasing.claims import _CLAIMED
from torch_utils._releasing.work import _enclosing

HERE = "torch_utils/_registry", "torch_utils/resource", "torch_utils/_interrupts", "/_coroutines"
# Each kind of instruction comes several times; all of them take a minute.
STEPS = [31, pytest.param(3, marks=pytest.mark.slow)]
SCOPE = *HERE, "torch_utils/_scope", "torch_utils/cleanup", "_releasing/work", "/closables"


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Each interrupt of a release is logged, with its traceback."""
    logger = logging.getLogger("torch_utils")
    logger.disabled = True
    yield
    logger.disabled = False


class Counted(Resource):
    def __init__(self) -> None:
        self.released = 0

    def _release(self) -> None:
        self.released += 1


class Naive:
    """The control: a claim, and then the release."""

    def __init__(self) -> None:
        self.released = 0
        self.lock = threading.Lock()

    def close(self) -> None:
        if self.lock.acquire(blocking=False):
            self.released += 1

    def __enter__(self) -> Naive:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def by_close(resource: Any, entered: list[bool]) -> None:
    entered.append(True)
    resource.close()


def by_with(resource: Any, entered: list[bool]) -> None:
    with resource:
        entered.append(True)


@pytest.mark.parametrize("way", [by_close, by_with])
def test_a_resource(way: Callable[[Any, list[bool]], None]) -> None:
    """A close that was interrupted has run to its end, or the next one does."""

    def check(number: int) -> bool:
        resource = Counted()
        entered: list[bool] = []
        reached, arrived = run_interrupted(lambda: way(resource, entered), number, *HERE)
        assert reached == arrived
        closed = resource.released == 1
        assert resource.close() is not closed
        assert (resource.released, resource.closed, len(REGISTRY)) == (1, True, before)
        if entered and not closed:
            later.append(number)
        return reached

    before = len(REGISTRY)
    later: list[int] = []
    assert everywhere(check) > 50
    # Only at the very entry nothing had begun: the call, and the first two instructions.
    assert len(later) <= 5, later


def test_control_of_a_naive_one() -> None:
    """Negative control: the same interrupts leave a lock and a flag claimed, and unreleased."""
    lost: list[int] = []

    def check(number: int) -> bool:
        resource = Naive()
        reached, _ = run_interrupted(lambda: by_with(resource, []), number, __file__)
        resource.close()
        if resource.released != 1:
            lost.append(number)
        return reached

    everywhere(check)
    assert lost


@pytest.mark.parametrize("step", STEPS)
def test_a_scope(step: int) -> None:
    """Whatever was managed when the interrupt came is released at once, and nothing is open."""

    def check(number: int) -> bool:
        calls: list[str] = []
        managed: list[Counted] = []
        entered: list[bool] = []
        tensor = torch.ones(3)

        def program() -> None:
            with SafePyTorchCleanup(tensor, collect="never") as scope:
                entered.append(True)
                managed.append(scope.manage(Counted()))
                scope.callback(calls.append, "first")
                managed.append(scope.manage(Counted()))
                scope.callback(lambda: calls.append("second"))
                entered.append(True)

        with warnings.catch_warnings():
            # Of a resource that the interrupt kept from being managed.
            warnings.simplefilter("ignore", ResourceWarning)
            reached, arrived = run_interrupted(program, number, *SCOPE)
        assert reached == arrived, number
        if entered:
            assert tensor.numel() == 0, number
        if len(entered) == 2:
            assert calls == ["second", "first"], number
        assert [r.released for r in managed] == [1] * len(managed), number
        assert _enclosing() is None, number
        calls.clear()
        del managed[:]
        assert len(REGISTRY) == before, (number, REGISTRY.open_entries())
        return reached

    before = len(REGISTRY)
    assert everywhere(check, step) > 500


@pytest.mark.parametrize("step", STEPS)
def test_an_async_scope(step: int) -> None:
    """The same, with coroutines to await."""

    def check(number: int) -> bool:
        calls: list[str] = []
        entered: list[bool] = []
        managed: list[Counted] = []

        async def closer(name: str) -> None:
            calls.append(name)

        async def work() -> None:
            async with SafePyTorchCleanup(collect="never") as scope:
                managed.append(scope.manage(Counted()))
                scope.callback(closer, "first")
                scope.callback(closer, "second")
                entered.append(True)

        def drive() -> None:
            try:
                work().send(None)
            except StopIteration:
                pass

        with warnings.catch_warnings():
            # Of a coroutine that the interrupt kept from being awaited.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", ResourceWarning)
            reached, arrived = run_interrupted(drive, number, *SCOPE)
        assert reached == arrived, number
        if entered and calls != ["second", "first"]:
            refused.append(number)
        assert [r.released for r in managed] == [1] * len(managed), number
        assert _enclosing() is None, number
        managed.clear()
        assert len(REGISTRY) == before, (number, REGISTRY.open_entries())
        return reached

    before = len(REGISTRY)
    refused: list[int] = []
    assert everywhere(check, step) > 500
    # Before the coroutine of the end has begun, an interrupt leaves nobody to await anything.
    assert len(refused) <= 200 / step, refused


@pytest.mark.parametrize("step", STEPS)
def test_a_release(step: int) -> None:
    """All that was to be released is, or nothing was touched yet; later releases are whole."""

    def check(number: int) -> bool:
        models, tensor = [nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(2)
        closing = Counted()
        reached, arrived = run_interrupted(
            lambda: release(*models, [tensor], closing, collect="never"), number, *files
        )
        assert reached == arrived, number
        released = {"released" in repr(model) for model in models} | {closing.released == 1}
        released.add(tensor.numel() == 0)
        assert not _CLAIMED, number
        assert len(released) == 1, number
        assert _enclosing() is None, number
        closing.close()
        assert closing.released == 1
        return reached

    files = "/work.py", "/closables", "/claims", "/target.py", "_releasing/tensors.py"
    assert everywhere(check, step) > 200


def test_a_timeout_in_a_release() -> None:
    """What a handler raises may be an Exception: it skips no object but the one it comes to."""

    def time_out() -> None:
        raise TimeoutError("of the program's own handler")

    def check(number: int) -> bool:
        models, reports = [nn.Linear(2, 2), nn.Linear(2, 2)], []
        try:
            reached, _ = run_interrupted(
                lambda: reports.append(release(*models, collect="never")),
                number,
                "/work.py",
                handler=time_out,
            )
        except TimeoutError:
            return True
        assert sum("released" in repr(model) for model in models) >= 2 - reached, number
        assert not reached or "handler" in str(reports[0].errors), number
        return reached

    assert everywhere(check, 7) > 20


def test_real_signals() -> None:
    """A timer that interrupts at any time: nothing is claimed and lost, nobody hangs."""
    result = run("""
    import signal
    from torch_utils import Resource, SafePyTorchCleanup

    class R(Resource):
        released = 0
        def __init__(self): self.released = 0
        def _release(self): self.released += 1

    def handler(*_): raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, handler)
    interrupts, wrong, kept = 0, 0, []
    for count in range(2000):
        a, b, entered = R(), R(), False
        kept += [a, b]  # An interrupt of a destructor is printed, by CPython.
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + count % 100 * 3e-6)
            with SafePyTorchCleanup(a, collect="never"):
                entered = True
                b.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        b.close()
        if not entered:
            a.close()
        wrong += (a.released, b.released) != (1, 1)
    assert interrupts, "not one came"
    assert not wrong, (wrong, interrupts)
    """)
    assert_clean(result)
