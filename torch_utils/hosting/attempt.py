"""One try to load a hosted model, and what it has to fit into."""

from __future__ import annotations

from typing import Any, Protocol

from torch_utils.hosting.tenants import Tenant

__all__ = ["Attempt", "Limits"]


class Attempt:
    """One try to load; those who wait for it learn what became of it.

    Attributes:
        deadline: When whoever began it stops waiting for room; None for never.
        no_room: Why there is none, while it waits for some.
        gave_up: Whether it waited in vain. Others may have more time, or less to hold on to.
        is_apart: Whether a thread of its own loads, whose interrupts are nobody else's.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.no_room = ""
        self.gave_up = False
        self.loading_since = 0.0
        self.thread = 0
        self.is_apart = False
        self.is_begun = False
        self.is_finished = False
        self.error: Exception | None = None


class Limits(Protocol):
    """What a load has to fit into."""

    def make_room(self, core: Any, attempt: Attempt) -> None:
        """Before a load: wait for room."""

    def check_room(self, core: Any, attempt: Attempt, tenant: Tenant) -> None:
        """After a load: wait for room again, for what it has turned out to be."""

    def start_over(self) -> None:
        """Be the limits of a fork, in which nothing is loaded, and no other thread lives."""
