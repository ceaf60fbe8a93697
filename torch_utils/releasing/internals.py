"""The private names of torch that a release uses, each with what happens where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

FALLBACKS = {
    "_C.DisableTorchFunction": "a class of tensors may notice that its tensors are looked at",
    "_C._DisableTorchDispatch": "a class of tensors may notice that its tensors are looked at",
    "_C._swap_tensor_impl": "tensors that are named by themselves stay as they are: an error each",
    "_C._is_cached_tensor": "what CUDA graphs of compiled code return is an error each",
    "UntypedStorage._weak_ref": "storages are not counted",
    "UntypedStorage._expired": "storages are not counted",
    "UntypedStorage._free_weak_ref": "storages are not counted",
    "UntypedStorage._cdata": "storages are not counted",
    "_C._cuda_clearCublasWorkspaces": "cuBLAS workspaces stay",
    "_C._host_emptyCache": "pinned host memory stays before torch 2.13",
}


def private(torch: Any, name: str) -> Any | None:
    """Return what torch has under one of the names in `FALLBACKS`, or None."""
    owner, _, attribute = name.partition(".")
    return getattr(getattr(torch, owner, None), attribute, None)


@contextmanager
def without_overrides(torch: Any) -> Iterator[None]:
    """Read tensors by torch's own code.

    What their classes and the program's modes (a default device, fake tensors) make of torch's
    functions is switched off meanwhile, in this thread.
    """
    functions = private(torch, "_C.DisableTorchFunction") or nullcontext
    dispatch = private(torch, "_C._DisableTorchDispatch") or nullcontext
    with functions(), dispatch():
        yield
