"""The harness that interrupts programs: it interrupts everywhere, and notices if it does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from support.interrupts import Place, interrupt_everywhere

SOURCE = """
done = []

def careless():
    done.append("begun")
    done.append("ended")
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
