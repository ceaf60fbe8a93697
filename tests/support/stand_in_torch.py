"""A stand-in for torch on machines with accelerators, and for broken installations of it."""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def installed(torch: Any) -> Iterator[Any]:
    """Have ``import torch`` find this in the block; None blocks the import."""
    before = pytest.importorskip("torch")
    sys.modules["torch"] = torch
    try:
        yield torch
    finally:
        sys.modules["torch"] = before


def stand_in(has_context: Callable[[int], bool] | None = None, **cuda: Any) -> Any:
    """Make a torch with two CUDA devices, the second of which has no context.

    Args:
        has_context: torch's own answer about contexts, which not all versions have.
        **cuda: What ``torch.cuda`` has instead.

    Returns:
        The stand-in; its ``visited`` lists what was done on which device.
    """
    visited: list[str] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            visited.append(f"enter {self.index}")

        def __exit__(self, *error: object) -> None:
            visited.append(f"exit {self.index}")

    defaults: dict[str, Any] = dict(  # noqa: C408  (names, as they are torch's)
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        get_device_name=lambda index: f"stand-in {index}",
        memory_allocated=lambda index: 10,
        memory_reserved=lambda index: [20, 0][index],
        mem_get_info=lambda index: (70, 100),
        device=Guard,
        empty_cache=lambda: visited.append("empty"),
    )
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(**{**defaults, **cuda}),
        version=types.SimpleNamespace(cuda="13.0"),
        backends=types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False)),
        __version__="9.9",
        visited=visited,
    )
    if has_context is not None:
        vars(torch)["_C"] = types.SimpleNamespace(_cuda_hasPrimaryContext=has_context)
    return torch
