"""Tests of interrupts at any instruction of a close, a release and the exit."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import gc
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.counted_resource import Counted
from support.interrupts import Place, interrupt_everywhere, send_sigint
from support.programs import assert_clean, run
from torch_utils import SafePyTorchCleanup, release

PACKAGE = "torch_utils"
# How many places are interrupted: each kind of instruction comes several times.
places = pytest.mark.parametrize("at_most", [100, pytest.param(200, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log, which gets the traceback of each interrupt."""
    logger = logging.getLogger(PACKAGE)
    logger.disabled = True
    with warnings.catch_warnings():
        # Of a resource that the interrupt kept from being managed, or a coroutine from being run.
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    logger.disabled = False


def assert_no_lock_is_held() -> None:
    """A scope and a release in another thread must finish."""
    done: list[int] = []

    def work() -> None:
        resource = Counted()
        with SafePyTorchCleanup(resource, collect="never") as scope:
            scope.callback(done.append, 1)
        release(torch.ones(1), collect="never")
        done.append(resource.released)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert done == [1, 1], "a lock stays held" if thread.is_alive() else done


def interrupt(
    check: Callable[[Place], object],
    minimum: int = 50,
    at_most: int | None = None,
    deliver: Callable[[], object] = send_sigint,
) -> int:
    """Interrupt the package everywhere, or at most so often; no lock may stay held."""
    if at_most is not None:
        minimum = at_most // 3
    count = interrupt_everywhere(
        check, package=PACKAGE, minimum=minimum, at_most=at_most, deliver=deliver
    )
    assert_no_lock_is_held()
    return count


@pytest.fixture
def timing_out() -> Iterator[Callable[[], object]]:
    """Send a signal to a handler that raises TimeoutError."""

    def time_out(*_: object) -> None:
        raise TimeoutError("of the program's own handler")

    before = signal.signal(signal.SIGALRM, time_out)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("times_out", [False, True])
def test_interrupted_close_raises_and_releases_once(
    in_block: bool, times_out: bool, timing_out: Callable[[], object]
) -> None:
    def check(place: Place) -> None:
        resource, raised = Counted(), False

        def use() -> None:
            with resource:
                pass

        try:
            place.run(use if in_block else resource.close)
        except TimeoutError:
            raised = True
        assert (raised if times_out else place.propagated) == place.delivered
        was_closed = resource.released
        assert resource.close() is not bool(was_closed)
        assert resource.close() is False
        assert (resource.released, resource.closed) == (1, True)

    interrupt(check, deliver=timing_out if times_out else send_sigint)


def test_signal_handler_that_closes_the_same_resource_releases_once() -> None:
    resources: list[Counted] = []

    def check(place: Place) -> None:
        resources.append(Counted())
        place.run(resources[-1].close)
        resources[-1].close()
        assert (resources[-1].released, resources[-1].closed) == (1, True)

    before = signal.signal(signal.SIGUSR1, lambda *_: resources[-1].close())
    try:
        interrupt(check, deliver=lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


@places
def test_interrupted_scope_releases_everything_once(at_most: int) -> None:
    def check(place: Place) -> None:
        calls: list[str] = []
        managed: list[Counted] = []
        tensor = torch.ones(3)
        steps: list[str] = []

        def program() -> None:
            with SafePyTorchCleanup(tensor, collect="never") as scope:
                steps.append("entered")
                managed.append(scope.manage(Counted()))
                scope.callback(calls.append, "first")
                steps.append("first")
                managed.append(scope.manage(Counted()))
                scope.callback(lambda: calls.append("second"))
                steps.append("second")

        place.run(program)
        assert place.propagated == place.delivered
        gc.collect()
        assert calls in ([], ["first"], ["second", "first"])
        if steps and tensor.numel():
            for_exit.append(place)
            assert (calls, sum(r.released for r in managed)) == ([], 0)
            return
        assert len(calls) >= len(steps) - 1
        assert [r.released for r in managed] == [1] * len(managed)

    for_exit: list[Place] = []
    gc.freeze()  # The many collections need not walk what was there before.
    try:
        count = interrupt(check, at_most=at_most)
    finally:
        gc.unfreeze()
    assert len(for_exit) <= count // 20, for_exit


@pytest.mark.slow
@places
def test_interrupted_async_scope_releases_everything_once(at_most: int) -> None:
    def check(place: Place) -> None:
        begun: list[str] = []
        ended: list[str] = []
        managed: list[Counted] = []
        entered: list[bool] = []

        async def closer(name: str) -> None:
            begun.append(name)
            ended.append(name)

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

        place.run(drive)
        assert place.propagated == place.delivered
        gc.collect()
        assert begun == ended
        assert begun in ([], ["first"], ["second"], ["second", "first"])
        if entered and len(ended) < 2:
            refused.append(place.number)
        assert [r.released for r in managed] == [1] * len(managed)

    refused: list[int] = []
    gc.freeze()
    try:
        count = interrupt(check, at_most=at_most)
    finally:
        gc.unfreeze()
    # Only before the coroutine of the end has begun, or while it is on its way out.
    assert len(refused) <= count // 5, refused


@pytest.mark.slow
@places
def test_interrupted_release_is_complete_or_not_started(at_most: int) -> None:
    def check(place: Place) -> None:
        models, tensor = [nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(2)
        closing = Counted()
        place.run(lambda: release(*models, [tensor], closing, collect="never"))
        assert place.propagated == place.delivered
        released = {"released" in repr(model) for model in models}
        released |= {closing.released == 1, tensor.numel() == 0}
        assert len(released) == 1, (models, closing.released, tensor)
        release(*models, [tensor], closing, collect="never")
        assert all("released" in repr(model) for model in models)
        assert (closing.released, tensor.numel()) == (1, 0)

    interrupt(check, at_most=at_most)


def test_second_sigint_interrupts_a_hanging_release() -> None:
    reached: list[str] = []

    def hang(self: Any) -> None:
        send_sigint()
        reached.append("put off")
        main = threading.main_thread().ident
        again = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        again.start()
        try:
            threading.Event().wait(60)
        finally:
            again.join()
        reached.append("never")

    resource, handler = Counted(hang), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        resource.close()
    assert reached == ["put off"]
    assert resource.close() is False
    assert (resource.released, resource.closed) == (1, True)
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):
        send_sigint()


class Stop(BaseException):
    """A BaseException that only the program itself catches."""


def test_deferred_signals_are_delivered_in_order() -> None:
    order: list[int] = []

    def handler(number: int, frame: object) -> None:
        order.append(number)
        raise Stop

    numbers = [signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        with pytest.raises(Stop):
            Counted(lambda self: [signal.raise_signal(number) for number in numbers]).close()
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
    assert order == numbers


EXIT = """
import os, sys
from support.interrupts import interrupt_everywhere, send_sigint
from torch_utils import Resource, SafePyTorchCleanup

class R(Resource):
    name = b""  # Of one that was interrupted before `__init__`.
    def __init__(self, name): self.name = name
    def _release(self): os.write(write, self.name)

def program():
    kept.append(R(b"a"))
    kept.append(R(b"b"))
    kept[-1].close()
    with SafePyTorchCleanup(kept[0], collect="never") as scope:
        kept.append(scope)
        scope.callback(os.write, write, b"c")
        kept.append("callback")

def check(place):
    global kept, write
    kept = []
    if place.number == 0:
        write = os.open(os.devnull, os.O_WRONLY)
        return place.run(program)
    read, write = os.pipe()
    if os.fork() == 0:
        place.run(program)
        os.write(write, b"!" * place.delivered)
        os.write(write, b"ABsC"[:len(kept)])
        sys.exit(0)  # The end of the program closes what is still open.
    os.close(write)
    with open(read, "rb") as file:
        written = file.read().decode()
    assert os.wait()[1] == 0, written
    place.runs, place.delivered = 1, "!" in written  # In the child.
    released = [letter for letter in written if letter in "abc"]
    assert len(released) == len(set(released)), written
    for letter in "abc":
        assert letter in released or letter.upper() not in written, written
    print(written)

AT_MOST = int(sys.argv[1])
interrupt_everywhere(
    check, package="torch_utils", minimum=AT_MOST // 2, at_most=AT_MOST, deliver=send_sigint
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_exit_closes_resources_that_an_interrupt_left_open(at_most: int) -> None:
    result = run(EXIT, str(at_most))
    assert_clean(result)
    after_the_interrupt = {line.partition("!")[2] for line in result.stdout.splitlines()}
    assert any("a" in rest for rest in after_the_interrupt)  # Some were left to the exit.


DESTRUCTOR = """
import signal
from torch_utils import Resource

class Safe(Resource):
    def __init__(self): pass
    def _release(self):
        COME
        print("released")
class Naive:
    def __del__(self):
        COME
kept = SUBJECT()
try:
    del kept
    for _ in range(10_000):
        pass
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
CTRL_C = "signal.raise_signal(signal.SIGINT)"


def test_signal_in_a_destructor_is_handled_after_its_release() -> None:
    result = run(DESTRUCTOR.replace("SUBJECT", "Safe").replace("COME", CTRL_C))
    assert (result.returncode, result.stdout) == (0, "released\nwent on\n"), str(result)
    assert result.stderr.startswith("Exception ignored in: <function Resource.__del__")
    assert "KeyboardInterrupt" in result.stderr


def test_keyboard_interrupt_raised_by_a_release_is_its_error() -> None:
    result = run(DESTRUCTOR.replace("SUBJECT", "Safe").replace("COME", "raise KeyboardInterrupt"))
    assert (result.returncode, result.stdout) == (0, "went on\n"), str(result)
    assert result.stderr.startswith("Exception ignored in: <function Resource.__del__")
