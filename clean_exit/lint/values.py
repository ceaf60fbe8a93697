"""What an expression may be: a module, a class, an object, or something from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

from clean_exit.lint.scopes import Class, Function, Module, Scope


@dataclass(frozen=True)
class Instance:
    """An object of a class of the project; `is_self` if it is the one that is destroyed."""

    cls: Class
    is_self: bool = False


@dataclass(frozen=True)
class Bound:
    """A method with its object."""

    function: Function
    receiver: Instance | Class


@dataclass(frozen=True)
class External:
    """Something outside of the project, dotted; ``()`` in it stands for the result of a call."""

    dotted: str


@dataclass(frozen=True)
class Super:
    """What ``super()`` gives: members of the classes after one of them."""

    receiver: Instance
    after: Class


Value = Union[Module, Class, Function, Instance, Bound, External, Super]  # noqa: UP007
Given = Mapping[tuple[Scope, str], Value]


@dataclass(frozen=True)
class Env:
    """Where an expression stands: its scope, and the object of the method that it is in.

    `given` has what is known of variables from the way there: arguments, say.
    """

    scope: Scope
    receiver: Instance | Class | None = None
    depth: int = 0
    given: Given = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """What a name is bound by.

    Attributes:
        kind: What kind of scope that is.
        scope: The scope that binds it.
        bindings: Definitions, imports, and expressions that are assigned to it.
    """

    kind: Literal["local", "closure", "class", "global", "builtin", "unknown"]
    scope: Scope
    bindings: tuple[object, ...] = ()


def dotted(value: Value | None) -> str:
    """Return the name of what comes from outside of the project; else nothing."""
    return value.dotted if isinstance(value, External) else ""


def is_own(value: Value | None) -> bool:
    """Whether something is of the project itself, where its source tells more than its name."""
    return isinstance(value, (Class, Function, Instance, Bound))
