"""Ctrl-C anywhere: each release runs exactly once, no lock stays held, no interrupt is lost."""

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
from support.interrupts import Place, interrupt_everywhere, raise_interrupt, send_sigint
from support.programs import assert_clean, run
from torch_utils import SafePyTorchCleanup, exit_on_signals, release

PACKAGE = "torch_utils"
deliveries = pytest.mark.parametrize("deliver", [raise_interrupt, send_sigint])
# How many places are interrupted: each kind of instruction comes several times.
places = pytest.mark.parametrize("at_most", [100, pytest.param(600, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each interrupt of a release is logged, with its traceback."""
    logger = logging.getLogger(PACKAGE)
    logger.disabled = True
    with warnings.catch_warnings():
        # Of a resource that the interrupt kept from being managed, or a coroutine from being run.
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    logger.disabled = False


def assert_no_lock_is_held() -> None:
    """A scope and a release in another thread come to their ends."""
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


class Naive:
    """The control: a claim, and then the release."""

    def __init__(self) -> None:
        self.released = 0
        self.lock = threading.Lock()

    def close(self) -> None:
        if self.lock.acquire(blocking=False):
            self.released += 1


@deliveries
@pytest.mark.parametrize("in_block", [False, True])
def test_resource_is_released_once(in_block: bool, deliver: Callable[[], object]) -> None:
    """By the close that was interrupted, or else by the next one."""

    def check(place: Place) -> None:
        resource = Counted()

        def use() -> None:
            with resource:
                pass

        place.run(use if in_block else resource.close)
        assert place.propagated == place.delivered
        was_closed = resource.released
        assert resource.close() is not bool(was_closed)
        assert resource.close() is False
        assert (resource.released, resource.closed) == (1, True)
        other = Counted()
        other.close()
        assert other.released == 1

    interrupt_everywhere(check, package=PACKAGE, minimum=50, deliver=deliver)
    assert_no_lock_is_held()


def test_control_of_a_naive_resource() -> None:
    released: set[int] = set()

    def check(place: Place) -> None:
        resource = Naive()
        place.run(resource.close)
        resource.close()
        released.add(resource.released)

    interrupt_everywhere(check, package=__name__, minimum=5)
    assert released == {0, 1}


def test_signal_handler_that_closes_the_same_resource_releases_once() -> None:
    resources: list[Counted] = []

    def check(place: Place) -> None:
        resources.append(Counted())
        place.run(resources[-1].close)
        resources[-1].close()
        assert (resources[-1].released, resources[-1].closed) == (1, True)

    before = signal.signal(signal.SIGUSR1, lambda *_: resources[-1].close())
    try:
        interrupt_everywhere(
            check, package=PACKAGE, minimum=50, deliver=lambda: signal.raise_signal(signal.SIGUSR1)
        )
    finally:
        signal.signal(signal.SIGUSR1, before)


@deliveries
@places
def test_scope_releases_everything_once(at_most: int, deliver: Callable[[], object]) -> None:
    """At once, or when the scope is collected; at the latest at exit, which is tested below."""

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
        count = interrupt_everywhere(
            check, package=PACKAGE, minimum=at_most // 3, at_most=at_most, deliver=deliver
        )
    finally:
        gc.unfreeze()
    assert len(for_exit) <= count // 20, for_exit
    assert_no_lock_is_held()


@deliveries
@places
def test_async_scope_releases_everything_once(at_most: int, deliver: Callable[[], object]) -> None:
    """The same with coroutines; one that nobody can await any more is not run by half."""

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
        count = interrupt_everywhere(
            check, package=PACKAGE, minimum=at_most // 3, at_most=at_most, deliver=deliver
        )
    finally:
        gc.unfreeze()
    assert_no_lock_is_held()
    # Only before the coroutine of the end has begun, or while it is on its way out.
    assert len(refused) <= count // 5, refused


@deliveries
@places
def test_release_is_whole_or_not_begun(at_most: int, deliver: Callable[[], object]) -> None:
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

    interrupt_everywhere(
        check, package=PACKAGE, minimum=at_most // 3, at_most=at_most, deliver=deliver
    )
    assert_no_lock_is_held()


@places
def test_handler_that_raises_an_error_skips_one_object_at_most(at_most: int) -> None:
    """A program's own timeout is an Exception: it comes out, or it is in the report."""

    def time_out() -> None:
        raise TimeoutError("of the program's own handler")

    outcomes: set[str] = set()

    def check(place: Place) -> None:
        models, reports = [nn.Linear(2, 2) for _ in range(3)], []
        try:
            place.run(lambda: reports.append(release(*models, collect="never")))
        except TimeoutError:
            outcomes.add("raised")
        skipped = sum("released" not in repr(model) for model in models)
        not_begun = not reports and skipped == len(models)
        assert skipped <= place.delivered or not_begun, models
        if reports and skipped:
            assert "handler" in str(reports[0].errors)
            outcomes.add("reported")

    interrupt_everywhere(
        check, package=PACKAGE, minimum=at_most // 3, at_most=at_most, deliver=time_out
    )
    assert outcomes == {"raised", "reported"}
    assert_no_lock_is_held()


def test_orderly_exit_releases_everything_once() -> None:
    """A signal of `exit_on_signals` anywhere: it ends the program, after what was begun."""

    def check(place: Place) -> None:
        outer, inner = Counted(), Counted()
        statuses: list[Any] = []

        def program() -> None:
            try:
                with outer:
                    inner.close()
            except SystemExit as error:
                statuses.append(error.code)

        with exit_on_signals(signal.SIGUSR1):
            place.run(program)
        assert statuses == [128 + signal.SIGUSR1] * place.delivered
        for resource in (outer, inner):
            resource.close()
            assert resource.released == 1

    interrupt_everywhere(
        check, package=PACKAGE, minimum=100, deliver=lambda: signal.raise_signal(signal.SIGUSR1)
    )
    assert_no_lock_is_held()


EXIT = """
import os, sys
from support.interrupts import interrupt_everywhere, raise_interrupt, send_sigint
from torch_utils import Resource, SafePyTorchCleanup

class R(Resource):
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
    place.delivered = "!" in written
    released = [letter for letter in written if letter in "abc"]
    assert len(released) == len(set(released)), written
    for letter in "abc":
        assert letter in released or letter.upper() not in written, written
    print(written)

AT_MOST, DELIVER = int(sys.argv[1]), globals()[sys.argv[2]]
interrupt_everywhere(
    check, package="torch_utils", minimum=AT_MOST // 2, at_most=AT_MOST, deliver=DELIVER
)
"""


@deliveries
@pytest.mark.parametrize("at_most", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_end_of_the_program_closes_what_an_interrupt_left_open(
    at_most: int, deliver: Callable[[], object]
) -> None:
    """Each release runs exactly once, whether at once, at the next collection or at exit."""
    result = run(EXIT, str(at_most), deliver.__name__)
    assert_clean(result)
    after_the_interrupt = {line.partition("!")[2] for line in result.stdout.splitlines()}
    assert any("a" in rest for rest in after_the_interrupt)  # Some were left to the exit.


def test_timer_that_interrupts_at_any_time() -> None:
    """Also inside of C, and between the end of a block and its ``__exit__``."""
    result = run("""
    import gc, signal
    from torch_utils import Resource, SafePyTorchCleanup

    class R(Resource):
        def __init__(self): self.released = 0
        def _release(self): self.released += 1

    def handler(*_): raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, handler)
    interrupts, wrong, kept = 0, 0, []
    def call(): calls.append(1)
    for count in range(1000):
        a, b, entered, calls, expected = R(), R(), False, [], 0
        kept += [a, b]  # An interrupt of a destructor is printed, by CPython.
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + count % 100 * 3e-6)
            with SafePyTorchCleanup(a, collect="never") as scope:
                entered = True
                scope.callback(call)
                expected = 1
                b.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        b.close()
        if not entered:
            a.close()
        if not a.released:
            gc.collect()
        wrong += (a.released, b.released) != (1, 1) or not expected <= len(calls) <= 1
    assert interrupts, "not one came"
    assert not wrong, (wrong, interrupts)
    """)
    assert_clean(result)


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


@pytest.mark.parametrize("imports", ["", "import threading\n"])
def test_interrupt_of_a_destructor_reaches_the_code_that_dropped_it(imports: str) -> None:
    result = run(imports + DESTRUCTOR.replace("SUBJECT", "Safe").replace("COME", CTRL_C))
    assert_clean(result)
    assert result.stdout.splitlines()[-1:] == ["interrupted"]


def test_control_of_a_naive_destructor() -> None:
    result = run(DESTRUCTOR.replace("SUBJECT", "Naive").replace("COME", CTRL_C))
    assert result.stdout == "went on\n"
    assert "Exception ignored" in result.stderr


def test_interrupt_that_a_release_itself_raises_is_not_a_ctrl_c() -> None:
    """In a destructor that is an error of the release, which is logged."""
    result = run(DESTRUCTOR.replace("SUBJECT", "Safe").replace("COME", "raise KeyboardInterrupt"))
    assert_clean(result)
    assert result.stdout == "went on\n"
