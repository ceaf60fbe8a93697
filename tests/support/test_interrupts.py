"""The harness that interrupts programs: it interrupts everywhere, and notices if it does not."""

from __future__ import annotations

from types import ModuleType

from tests.support.interrupts import Place, interrupt_everywhere

SOURCE = """
done = []

def careless():
    done.append("begun")
    done.append("ended")
"""


def test_every_state_of_a_program_is_seen() -> None:
    module, states = ModuleType("interrupted_package.part"), set()
    exec(SOURCE, vars(module))

    def check(place: Place) -> None:
        module.done.clear()
        place.run(module.careless)
        assert place.delivered == place.propagated == (place.number > 0)
        states.add(tuple(module.done))

    count = interrupt_everywhere(check, package="interrupted_package", minimum=8)
    assert states == {(), ("begun",), ("begun", "ended")}
    fewer = interrupt_everywhere(check, package="interrupted_package", minimum=3, at_most=3)
    assert fewer == 3 < count
