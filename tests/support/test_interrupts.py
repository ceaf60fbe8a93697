"""The harness that interrupts programs: it interrupts everywhere, and notices if it does not."""

from __future__ import annotations

import importlib.util
import signal
import threading
from pathlib import Path
from types import ModuleType

import pytest

from support.interrupts import Place, interrupt_everywhere, send_sigint

SOURCE = """
import threading

LOCK = threading.Lock()
done = []

def careless():
    done.append("begun")
    done.append("ended")

def careful():
    with LOCK:
        done.append("begun")
        return done.append("ended")

class Dropped:
    def __del__(self):
        careless()

def drop():
    Dropped()
    done.append("dropped")
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "part.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("interrupted_package.part", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_state_of_a_program_is_seen(module: ModuleType) -> None:
    states = set()

    def check(place: Place) -> None:
        module.done.clear()
        place.run(module.careless)
        assert place.delivered == place.propagated == (place.number > 0)
        states.add(tuple(module.done))

    count = interrupt_everywhere(check, package="interrupted_package", minimum=8)
    assert states == {(), ("begun",), ("begun", "ended")}
    fewer = interrupt_everywhere(check, package="interrupted_package", minimum=3, at_most=3)
    assert fewer == 3 < count


def test_lock_is_never_left_held(module: ModuleType) -> None:
    def check(place: Place) -> None:
        place.run(module.careful)
        assert not module.LOCK.locked(), place

    interrupt_everywhere(check, package="interrupted_package", minimum=5)


def test_destructors_are_not_interrupted(module: ModuleType) -> None:
    def check(place: Place) -> None:
        module.done.clear()
        place.run(module.drop)
        assert place.propagated == place.delivered
        assert module.done in ([], ["begun", "ended"], ["begun", "ended", "dropped"])

    interrupt_everywhere(check, package="interrupted_package", minimum=8)


def test_real_sigint_is_handled_by_the_program(module: ModuleType) -> None:
    received = []

    def check(place: Place) -> None:
        module.done.clear()
        place.run(module.careless)
        assert module.done == ["begun", "ended"]
        assert not place.propagated

    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        count = interrupt_everywhere(
            check, package="interrupted_package", minimum=8, deliver=send_sigint
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(received) == count


def test_real_sigint_raises_with_pythons_own_handler(module: ModuleType) -> None:
    def check(place: Place) -> None:
        place.run(module.careless)
        assert place.propagated == place.delivered

    interrupt_everywhere(check, package="interrupted_package", minimum=8, deliver=send_sigint)


def test_interrupt_check_fails_if_nothing_is_interrupted(module: ModuleType) -> None:
    with pytest.raises(AssertionError, match="0 places of elsewhere were interrupted"):
        interrupt_everywhere(
            lambda place: place.run(module.careless), package="elsewhere", minimum=1
        )
    with pytest.raises(AssertionError, match="which is fewer than 1000"):
        interrupt_everywhere(
            lambda place: place.run(module.careless), package="interrupted_package", minimum=1000
        )


def test_interrupt_check_fails_if_the_program_does_not_run(module: ModuleType) -> None:
    with pytest.raises(AssertionError, match="called 0 times, not once"):
        interrupt_everywhere(lambda place: None, package="interrupted_package", minimum=1)


def test_interrupt_check_fails_if_the_program_runs_in_another_thread(module: ModuleType) -> None:
    def in_thread() -> None:
        thread = threading.Thread(target=module.careless)
        thread.start()
        thread.join()

    with pytest.raises(AssertionError, match="0 places"):
        interrupt_everywhere(
            lambda place: place.run(in_thread), package="interrupted_package", minimum=1
        )


def test_other_exceptions_of_the_program_are_not_hidden(module: ModuleType) -> None:
    def fail() -> None:
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        interrupt_everywhere(
            lambda place: place.run(fail), package="interrupted_package", minimum=1
        )
