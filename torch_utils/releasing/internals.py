"""The private names of torch that a release uses, and the effect if one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

FALLBACKS = {
    "_C.DisableTorchFunction": "a tensor subclass may notice that its tensors are read",
    "_C._DisableTorchDispatch": "a tensor subclass may notice that its tensors are read",
    "_C._swap_tensor_impl": "tensors passed by themselves stay as they are, with an error each",
    "_C._is_cached_tensor": "outputs of compiled code's CUDA graphs are errors",
    "UntypedStorage._weak_ref": "storages are not counted",
    "UntypedStorage._expired": "storages are not counted",
    "UntypedStorage._free_weak_ref": "storages are not counted",
    "UntypedStorage._cdata": "storages are not counted",
    "_C._cuda_clearCublasWorkspaces": "cuBLAS workspaces are not cleared",
    "_C._host_emptyCache": "pinned host memory is not freed before torch 2.13",
}


def private(torch: Any, name: str) -> Any | None:
    """Return torch's attribute for one of the names in `FALLBACKS`, or None."""
    owner, _, attribute = name.partition(".")
    return getattr(getattr(torch, owner, None), attribute, None)


@contextmanager
def without_overrides(torch: Any) -> Iterator[None]:
    """Disable overrides of torch's functions in this thread.

    Tensor subclasses and modes, such as a default device or fake tensors, override functions.
    """
    functions = private(torch, "_C.DisableTorchFunction") or nullcontext
    dispatch = private(torch, "_C._DisableTorchDispatch") or nullcontext
    with functions(), dispatch():
        yield
