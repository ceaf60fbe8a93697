"""Tests of interrupts at any instruction of a close, a release and the exit."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="func-returns-value"

import gc
import logging
import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.counted_resource import Counted
from tests.support.interrupts import Place, interrupt_everywhere, send_sigint
from tests.support.programs import run
from tests.support.releasing import optimizer_with_state
from tests.support.threads import in_threads
from torch_utils import ReleasedError, SafePyTorchCleanup, release

PACKAGE = "torch_utils"


# Of a resource that the interrupt kept from being managed.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the log, which gets the traceback of each interrupt."""
    monkeypatch.setattr(logging.getLogger(PACKAGE), "disabled", True)


def assert_no_lock_is_held() -> None:
    """A scope and a release in another thread must finish."""

    def work() -> tuple[int, int]:
        resource, tensor = Counted(), torch.ones(1)
        with SafePyTorchCleanup(resource, collect="never"):
            pass
        release(tensor, collect="never")
        return resource.released, tensor.numel()

    assert in_threads(work) == [(1, 0)]


def interrupt(check: Callable[[Place], object], at_most: int) -> int:
    """Interrupt the package so often; no lock may stay held."""
    count = interrupt_everywhere(
        check, package=PACKAGE, minimum=at_most // 3, at_most=at_most, deliver=send_sigint
    )
    assert_no_lock_is_held()
    return count


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("at_most", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_interrupted_scope_releases_everything_once(at_most: int) -> None:
    def check(place: Place) -> None:
        calls, steps, managed = list[int](), list[int](), list[Counted]()
        tensor = torch.ones(3)

        def program() -> None:
            with SafePyTorchCleanup(tensor, collect="never") as scope:
                steps.append(0)
                managed.append(scope.manage(Counted()))
                scope.callback(calls.append, 1)
                steps.append(1)
                managed.append(scope.manage(Counted()))
                scope.callback(lambda: calls.append(2))
                steps.append(2)

        place.run(program)
        assert place.propagated == place.delivered
        gc.collect()
        assert calls in ([], [1], [2, 1])
        if steps and tensor.numel():
            for_exit.append(place)
            assert (calls, sum(r.released for r in managed)) == ([], 0)
            return
        assert len(calls) >= len(steps) - 1
        assert [r.released for r in managed] == [1] * len(managed)

    for_exit: list[Place] = []
    count = interrupt(check, at_most)
    assert len(for_exit) <= count // 20, for_exit


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_heap")
def test_interrupted_release_is_complete_or_not_started() -> None:
    def check(place: Place) -> None:
        models, tensor = [nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))], torch.ones(2)
        closing, optimizer = Counted(), optimizer_with_state()

        def release_all() -> None:
            report = release(*models, [tensor], closing, optimizer, collect="never")
            assert report.errors == ()

        def states() -> set[bool]:
            found = {closing.released == 1, tensor.numel() == 0}
            uses: list[Any] = [partial(model, torch.ones(2, 2)) for model in models]
            for use in (*uses, lambda: optimizer.step()):
                try:
                    use()
                    found.add(False)
                except ReleasedError:
                    found.add(True)
            return found

        place.run(release_all)
        assert place.propagated == place.delivered
        assert len(states()) == 1, (models, closing.released, tensor)
        release_all()
        assert states() == {True}
        assert torch.is_grad_enabled()
        assert vars(torch)["_C"]._is_torch_function_enabled()  # noqa: SLF001  (of torch)

    interrupt(check, at_most=150)


def send_sigint_twice() -> None:
    """Send a SIGINT that is put off, and one that is delivered at once."""
    send_sigint()
    send_sigint()


def test_second_sigint_interrupts_a_release_that_may_hang() -> None:
    reached: list[str] = []

    def hang(self: Any) -> None:
        send_sigint()
        reached.append("put off")
        send_sigint()
        reached.append("never")

    resource, handler = Counted(hang), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        resource.close()
    assert reached == ["put off"]
    assert resource.close() is False
    assert (resource.released, resource.closed) == (1, True)
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_sigint_leaves_no_signal_put_off_for_ever() -> None:
    """Also at the very end, when the handlers have not been restored yet."""

    def check(place: Place) -> None:
        place.run(Counted().close)
        with pytest.raises(KeyboardInterrupt):
            send_sigint()

    interrupt_everywhere(check, package=PACKAGE, minimum=50, deliver=send_sigint_twice)


def test_deferred_signals_are_delivered_in_order() -> None:
    order: list[int] = []

    def handler(number: int, frame: object) -> None:
        order.append(number)
        raise SystemExit

    numbers = [signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(SystemExit):
            Counted(lambda self: [signal.raise_signal(number) for number in numbers]).close()
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)
    assert order == numbers


DESTRUCTOR = """
import signal
from torch_utils import Resource

class Safe(Resource):
    def _release(self):
        COME
        print("released")
kept = Safe()
del kept
for _ in range(10_000):
    pass
print("went on")
"""
CTRL_C = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    ("come", "stdout"), [(CTRL_C, "released\nwent on\n"), ("raise KeyboardInterrupt", "went on\n")]
)
def test_interrupt_in_a_destructor_is_handled_after_its_release(come: str, stdout: str) -> None:
    """One that the release itself raises is an error of it."""
    result = run(DESTRUCTOR.replace("COME", come))
    assert (result.returncode, result.stdout) == (0, stdout), str(result)
    # "while calling deallocator" from Python 3.14 on.
    heading = r"Exception ignored (in:|while calling deallocator) <function Resource\.__del__"
    assert re.match(heading, result.stderr), str(result)
    assert "KeyboardInterrupt" in result.stderr
