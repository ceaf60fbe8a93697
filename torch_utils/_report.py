"""CleanupReport: what a release freed, and what is still held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch_utils._memory import MemorySnapshot
from torch_utils._runtime import early_bound
from torch_utils.errors import repr_of

FREE_BY_NOW = "nothing any longer: it is free by now"
_UNKNOWN = "something that was not found"


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
        what: The tensor's name in the released object ("encoder.weight"), or that of the part that
            stays whole.
        nbytes: Size of its storages, in bytes.
        device: "host", or torch's name of the device ("cuda:0").
    """

    what: str
    nbytes: int
    device: str
    _holders: tuple[str, ...] | Callable[[], tuple[str, ...]] = field(
        default=(), repr=False, compare=False
    )

    @cached_property
    def holders(self) -> tuple[str, ...]:
        """What references it, variables first; empty if no holder was found.

        The first reading searches for it, in some passes over the heap of 20 to 40 ms per million
        objects each. So it says what holds the memory at that time. Nothing is kept alive.
        """
        found = self._holders
        return found() if callable(found) else found

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.nbytes, self.device, self.holders)

    def __str__(self) -> str:
        by = " and by ".join(self.holders) or _UNKNOWN
        return f"{self.what} ({format_bytes(self.nbytes)} on {self.device}), held by {by}"

    @property
    def _advice(self) -> str:
        names = [one.split("'")[1] for one in self.holders if is_variable(one)]
        return f"to free it, pass {names[0]} too" if names else ""


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
        lent_bytes: Bytes that were returned to the array, the buffer or the file that had lent them
            to torch, and that are still in memory. They do not count as freed.
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
    lent_bytes: int = 0

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
        if self.lent_bytes:
            lent = format_bytes(self.lent_bytes)
            parts.append(f"returned {lent} to the array or file that had lent them to torch")
        before, after = self.before.host, self.after.host
        if before.rss_bytes:
            parts.append(
                f"resident {format_bytes(before.rss_bytes)} -> {format_bytes(after.rss_bytes)}"
                f" (anonymous {format_bytes(before.anonymous_bytes)} -> "
                f"{format_bytes(after.anonymous_bytes)})"
            )
        if self.still_held:
            # A variable as the holder tells best what to do; the search for others takes longer.
            large = self.still_held[:10]
            first = min(large, key=lambda held: not any(map(is_variable, held.holders)))
            others = len(self.still_held) - 1
            more = f" and {others} more" if others else ""
            parts.append(f"still held: {format_bytes(self.still_held_bytes)}: {first}{more}")
            parts += filter(None, [first._advice])
            when = "" if first.holders == (FREE_BY_NOW,) else "once it is free, "
            parts.append(f"{when}release() without arguments returns its memory")
        return parts
