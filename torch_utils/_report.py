"""CleanupReport: what a release freed, and what is still held."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_utils._memory import MemorySnapshot
from torch_utils._runtime import early_bound
from torch_utils.errors import repr_of

_UNKNOWN = "something that was not found, such as a numpy view or an autograd graph"
if sys.version_info < (3, 13):
    _UNKNOWN = "probably a local variable of a running function, a numpy view or an autograd graph"


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, such as ``90.9 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def is_variable(holder: str) -> bool:
    """Return whether the description of a holder names a variable."""
    return holder.startswith("the variable ")


@dataclass(frozen=True)
class StillHeld:
    """Memory that was released but is still referenced elsewhere.

    Attributes:
        what: The tensor's name in the released object ("encoder.weight").
        nbytes: Size of its storage, in bytes.
        device: "host", or torch's name of the device ("cuda:0").
        holders: What references it, variables first. Empty if no holder was found.
    """

    what: str
    nbytes: int
    device: str
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        by = " and ".join(self.holders) or _UNKNOWN
        advice = "; pass it too" if any(map(is_variable, self.holders)) else ""
        return f"{self.what} ({format_bytes(self.nbytes)} on {self.device}), held by {by}{advice}"


@dataclass(frozen=True)
class CleanupReport:
    """The result of a release or of a scope. ``str(report)`` is one line.

    Attributes:
        freed_bytes: Bytes of storages that no longer exist, by "host" and device ("cuda:0").
        still_held: Storages that were given up but still exist, the largest first.
        errors: Exceptions of the cleanup's steps; every step ran nevertheless. Their frames are
            cleared, so that the report keeps no memory alive.
        duration_s: Seconds from the first step to the last.
        before: Memory before the first step, as the operating system and the device allocators
            count it.
        after: Memory after the last step.
        skipped: Why objects were only closed and no memory was released or counted ("the program
            is ending"); empty otherwise.
    """

    freed_bytes: Mapping[str, int] = field(default_factory=dict)
    still_held: tuple[StillHeld, ...] = ()
    errors: tuple[BaseException, ...] = ()
    duration_s: float = 0.0
    before: MemorySnapshot = field(default_factory=MemorySnapshot)
    after: MemorySnapshot = field(default_factory=MemorySnapshot)
    skipped: str = ""

    @property
    def total_freed_bytes(self) -> int:
        """Bytes of all storages that no longer exist, on the host and all devices."""
        return sum(self.freed_bytes.values())

    @property
    def still_held_bytes(self) -> int:
        """Bytes of all storages in ``still_held``."""
        return sum(held.nbytes for held in self.still_held)

    @property
    def returned_bytes(self) -> Mapping[str, int]:
        """Bytes that were returned to the operating system ("host") and to each device's driver.

        This is ``before`` minus ``after``; negative if other work took memory meanwhile.
        """
        difference = self.before - self.after
        returned = {"host": difference.host.rss_bytes}
        returned.update((name, m.reserved_bytes) for name, m in difference.devices.items())
        return returned

    @early_bound
    def __str__(self) -> str:
        skipped = f"only closed, nothing counted: {self.skipped}"
        parts = [skipped] if self.skipped else self._measured()
        if self.errors:
            plural = "s" if len(self.errors) > 1 else ""
            first = repr_of(self.errors[0])
            parts.append(f"{len(self.errors)} error{plural}, the first: {first}")
        return "; ".join(parts)

    def _measured(self) -> list[str]:
        freed = ", ".join(f"{format_bytes(n)} on {d}" for d, n in self.freed_bytes.items() if n)
        parts = [f"freed {freed or 'no tensors'} in {self.duration_s * 1e3:.1f} ms"]
        before, after = self.before.host, self.after.host
        if before.rss_bytes:
            parts.append(
                f"resident {format_bytes(before.rss_bytes)} -> {format_bytes(after.rss_bytes)}"
                f" (anonymous {format_bytes(before.anonymous_bytes)} -> "
                f"{format_bytes(after.anonymous_bytes)})"
            )
        if self.still_held:
            # A variable as the holder tells best what to do.
            first = min(self.still_held, key=lambda held: not any(map(is_variable, held.holders)))
            others = len(self.still_held) - 1
            more = f" and {others} more" if others else ""
            parts.append(f"still held: {format_bytes(self.still_held_bytes)}: {first}{more}")
            parts.append("once it is free, release() without arguments returns its memory")
        return parts
