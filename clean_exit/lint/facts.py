"""What is known at a point of a destructor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Told = tuple[str, str]
"""An attribute, and what is told of it: "there", "none", "full" (not None), "true" or "false"."""

_STORED = "stored"
_RULED_OUT = {"true": {"false", "none"}, "full": {"none"}, "none": {"true", "full"},
              "false": {"true"}}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What holds at a point of a destructor.

    Attributes:
        alive: The interpreter is not being taken apart.
        present: The names, with their module's file, that are not None.
        caught: The exceptions that somebody around here catches.
        known: What tests, reads and assignments have told of the object's attributes.
        began: The same of what they were when the destructor began; once it has set an attribute,
            later tests tell nothing of the beginning.
    """

    alive: bool = False
    present: frozenset[tuple[str, str]] = frozenset()
    caught: frozenset[str] = frozenset()
    known: frozenset[Told] = frozenset()
    began: frozenset[Told] = frozenset()

    @property
    def has(self) -> set[str]:
        """The attributes of the object that exist."""
        return {name for name, what in self.known if what == "there"}

    def plus(self, other: Facts) -> Facts:
        """Return what holds if both do."""
        return Facts(
            self.alive or other.alive,
            self.present | other.present,
            self.caught | other.caught,
            self.known | other.known,
            self.began | {one for one in other.began if (one[0], _STORED) not in self.known},
        )

    def common(self, other: Facts) -> Facts:
        """Return what holds on either of two ways."""
        return Facts(
            self.alive and other.alive,
            self.present & other.present,
            self.caught & other.caught,
            self.known & other.known,
            self.began & other.began,
        )

    def storing(self, name: str, *whats: str) -> Facts:
        """Return what holds after an attribute was set to something of which this is known."""
        others = {one for one in self.known if one[0] != name}
        new = {(name, what) for what in (_STORED, "there", *whats)}
        return replace(self, known=frozenset(others | new))

    def catching(self, names: Iterable[str]) -> Facts:
        """Return what holds inside of a try that catches exceptions."""
        return replace(self, caught=self.caught | set(names))

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})

    def rules_out(self, name: str, what: str) -> bool:
        """Whether an attribute is known to be something else."""
        return any((name, other) in self.known for other in _RULED_OUT[what])

    def asked(self, name: str) -> bool:
        """Whether a test has told anything of an attribute."""
        return any(one == name and what in _RULED_OUT for one, what in self.known)

    def of_attributes(self, names: Iterable[str]) -> Facts:
        """Return that attributes are there, as far as that is known here, and no more."""
        there = {(name, "there") for name in names}
        return Facts(known=self.known & there, began=self.began & there)


NOTHING = Facts()
ALIVE = Facts(alive=True)


def told(name: str | None, *whats: str) -> Facts:
    """Return what a test has told of an attribute."""
    new = frozenset((name, what) for what in whats) if name else frozenset()
    return Facts(known=new, began=new)
