"""What is known at a point of a destructor."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

Fact = tuple[str, str]
"""An attribute and a state: "there", "stored", "none", "full" (not None), "true" or "false".

A name in parentheses is a parameter of the function.
"""

_STORED = "stored"
_STATES = ("there", _STORED, "none", "full", "true", "false")
_EXCLUDED_BY = {"true": {"false", "none"}, "full": {"none"}, "none": {"true", "full"},
                "false": {"true"}}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What holds at a point of a destructor.

    Attributes:
        alive: The interpreter is not shutting down.
        present: The global names that are not None.
        caught: The names of the exceptions that a surrounding handler catches.
        known: What tests, reads and assignments have shown about the object's attributes.
        at_start: The same for the time when the destructor began. Once the destructor has set an
            attribute, a test of it says nothing about the start.
    """

    alive: bool = False
    present: frozenset[str] = frozenset()
    caught: frozenset[str] = frozenset()
    known: frozenset[Fact] = frozenset()
    at_start: frozenset[Fact] = frozenset()

    def has(self, name: str | None) -> bool:
        """Whether an attribute of the object exists."""
        return (name, "there") in self.known

    def plus(self, other: Facts) -> Facts:
        """Return what holds if both hold."""
        new = {one for one in other.at_start if (one[0], _STORED) not in self.known}
        return Facts(
            self.alive or other.alive,
            self.present | other.present,
            self.caught | other.caught,
            self.known | other.known,
            self.at_start | new,
        )

    def common(self, other: Facts) -> Facts:
        """Return what holds on both of two ways to a point."""
        return Facts(
            self.alive and other.alive,
            self.present & other.present,
            self.caught & other.caught,
            self.known & other.known,
            self.at_start & other.at_start,
        )

    def storing(self, name: str, *states: str) -> Facts:
        """Return what holds after an attribute was set to a value with these states."""
        new = {(name, state) for state in (_STORED, "there", *states)}
        known = self.forgetting(name).known | new
        return replace(self, known=known)

    def forgetting(self, name: str) -> Facts:
        """Return the facts without those about an attribute or a parameter."""
        return replace(self, known=self.known - {(name, state) for state in _STATES})

    def states(self, name: str) -> list[str]:
        """Return the known states of an attribute's or a parameter's value."""
        return [state for state in _EXCLUDED_BY if (name, state) in self.known]

    def catching(self, names: Iterable[str]) -> Facts:
        """Return what holds inside a try statement that catches exceptions."""
        return replace(self, caught=self.caught | set(names))

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})

    def excludes(self, name: str, state: str) -> bool:
        """Whether an attribute is known to have another state."""
        return any((name, other) in self.known for other in _EXCLUDED_BY.get(state, ()))

    def without_parameters(self) -> Facts:
        """Return what holds in another function."""
        return replace(self, known=frozenset(one for one in self.known if one[0][0] != "("))


NOTHING = Facts()
ALIVE = Facts(alive=True)


def facts_about(name: str | None, *states: str) -> Facts:
    """Return the facts that a test of an attribute shows."""
    new = frozenset((name, state) for state in states) if name else frozenset()
    return Facts(known=new, at_start=new)


def states_of(value: object) -> list[str]:
    """Return the known states of an expression's value."""
    if isinstance(value, ast.Constant):
        return ["none"] if value.value is None else [str(bool(value.value)).lower()]
    return []
