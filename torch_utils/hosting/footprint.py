"""The memory of models, piece by piece: a budget counts once what two of them share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

__all__ = ["ASLEEP", "Footprint", "awake_bytes", "footprint_of", "by_device"]

ASLEEP = "asleep"
"""The device of pieces in host memory that belong on another one."""
Footprint = Mapping[Hashable, tuple[str, int]]
"""The device and the bytes of each piece of memory. Models that share a storage share its key."""


def by_device(footprint: Footprint) -> dict[str, int]:
    """Return the bytes on the host and on each device."""
    sizes = Counter[str]()
    for device, nbytes in footprint.values():
        sizes["host" if device == ASLEEP else device] += nbytes
    return dict(sizes)


def awake_bytes(footprint: Footprint) -> int:
    """Return the bytes on all devices and on the host, without those of sleepers."""
    return sum(nbytes for device, nbytes in footprint.values() if device != ASLEEP)


def footprint_of(owner: Hashable, sizes: Mapping[str, int]) -> Footprint:
    """Return a footprint that nothing else shares."""
    return {(owner, device): (device, nbytes) for device, nbytes in sizes.items()}
