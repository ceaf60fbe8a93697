"""What is known at a point of a destructor."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

Told = tuple[str, str]
"""An attribute, and what is told of it: "there", "none", "full" (not None), "true" or "false".

Or a parameter of the function, in parentheses.
"""

_STORED = "stored"
_TELLS = ("there", _STORED, "none", "full", "true", "false")
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
        began: The same of what they were when the destructor began; after it has set an attribute,
            a test of that one no longer tells about the beginning.
        maybe: The attributes that have been set on one way or another.
    """

    alive: bool = False
    present: frozenset[tuple[str, str]] = frozenset()
    caught: frozenset[str] = frozenset()
    known: frozenset[Told] = frozenset()
    began: frozenset[Told] = frozenset()
    maybe: frozenset[str] = frozenset()

    def has(self, name: str | None) -> bool:
        """Whether an attribute of the object exists."""
        return (name, "there") in self.known

    def plus(self, other: Facts) -> Facts:
        """Return what holds if both do."""
        return Facts(
            self.alive or other.alive,
            self.present | other.present,
            self.caught | other.caught,
            self.known | other.known,
            self.began | {one for one in other.began if (one[0], _STORED) not in self.known},
            self.maybe | other.maybe,
        )

    def common(self, other: Facts) -> Facts:
        """Return what holds on either of two ways."""
        return Facts(
            self.alive and other.alive,
            self.present & other.present,
            self.caught & other.caught,
            self.known & other.known,
            self.began & other.began,
            self.maybe | other.maybe,
        )

    def storing(self, name: str, *whats: str) -> Facts:
        """Return what holds after an attribute was set to something of which this is known."""
        new = {(name, what) for what in (_STORED, "there", *whats)}
        known = self.forgetting(name).known | new
        return replace(self, known=known, maybe=self.maybe | {name})

    def forgetting(self, name: str) -> Facts:
        """Return what holds without what is known of an attribute or a parameter."""
        return replace(self, known=self.known - {(name, what) for what in _TELLS})

    def tells(self, name: str) -> list[str]:
        """Return what tests and assignments have told of an attribute or a parameter."""
        return [what for what in _RULED_OUT if (name, what) in self.known]

    def catching(self, names: Iterable[str]) -> Facts:
        """Return what holds inside of a try that catches exceptions."""
        return replace(self, caught=self.caught | set(names))

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})

    def rules_out(self, name: str, what: str) -> bool:
        """Whether an attribute is known to be something else."""
        return any((name, other) in self.known for other in _RULED_OUT.get(what, ()))

    def without_parameters(self) -> Facts:
        """Return what holds in another function."""
        return replace(self, known=frozenset(one for one in self.known if one[0][0] != "("))


NOTHING = Facts()
ALIVE = Facts(alive=True)


def told(name: str | None, *whats: str) -> Facts:
    """Return what a test has told of an attribute."""
    new = frozenset((name, what) for what in whats) if name else frozenset()
    return Facts(known=new, began=new)


def truth_of(value: object) -> list[str]:
    """Return what is told of an attribute that is set to an expression."""
    if isinstance(value, ast.Constant):
        return ["none"] if value.value is None else [str(bool(value.value)).lower()]
    if isinstance(value, (ast.List, ast.Tuple)):
        return [str(bool(value.elts)).lower()]
    return [str(bool(value.keys)).lower()] if isinstance(value, ast.Dict) else []
