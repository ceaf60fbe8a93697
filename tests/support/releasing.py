"""Helpers of the tests of `release`: weak storages and garbage collections."""

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


def weak(*things: torch.Tensor | nn.Module) -> list[StorageWeakRef]:
    """Refer weakly to the storages of tensors, and of all tensors of modules."""
    tensors: list[torch.Tensor] = []
    for thing in things:
        tensors += [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else []
        tensors += [thing] if isinstance(thing, torch.Tensor) else []
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def gone(storages: Sequence[StorageWeakRef]) -> bool:
    """Return whether all these storages are freed."""
    assert storages, "there are no storages"
    return all(storage.expired() for storage in storages)


@contextlib.contextmanager
def garbage_collections() -> Iterator[list[int]]:
    """List the generations of the garbage collections that run meanwhile; 2 is a full one."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Switch the automatic garbage collection off, and then as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def optimizer_with_state() -> torch.optim.Optimizer:
    layer = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(20)).sum().backward()
    optimizer.step()
    return optimizer
