"""Pieces of memory that models hold, by which budgets count what two of them share once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

__all__ = ["ASLEEP", "Blocks", "awake_bytes", "blocks_of", "by_device"]

ASLEEP = "asleep"
"""The device of blocks in host memory that belong on another one."""
Blocks = Mapping[Hashable, tuple[str, int]]
"""The device and the bytes of each piece of memory. Models that share a storage share its key."""


def by_device(blocks: Blocks) -> dict[str, int]:
    """Return the bytes on the host and on each device."""
    sizes = Counter[str]()
    for device, nbytes in blocks.values():
        sizes["host" if device == ASLEEP else device] += nbytes
    return dict(sizes)


def awake_bytes(blocks: Blocks) -> int:
    """Return the bytes on all devices and on the host, without those of sleepers."""
    return sum(nbytes for device, nbytes in blocks.values() if device != ASLEEP)


def blocks_of(owner: Hashable, sizes: Mapping[str, int]) -> Blocks:
    """Return blocks that nothing else shares."""
    return {(owner, device): (device, nbytes) for device, nbytes in sizes.items()}
