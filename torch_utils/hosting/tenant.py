"""A loaded model in this process or in its own, and its unloading."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch_utils._runtime import log, whole_torch
from torch_utils.errors import TorchUtilsError
from torch_utils.hosting.process import ModelProcess
from torch_utils.releasing.objects import (
    attributes_of,
    contents_of,
    entries_of,
    is_instance,
    is_released,
)
from torch_utils.releasing.run import release
from torch_utils.releasing.sizes import sizes_of
from torch_utils.releasing.targets import tree_of
from torch_utils.report import CleanupReport
from torch_utils.resource import Resource

__all__ = ["Tenant", "ThreadTenant"]

WARNING = 30


class ThreadTenant:
    """A model in this process.

    Args:
        name: Its name in errors.
        load: Returns the model.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.report: CleanupReport = CleanupReport()
        self.model: Any = None
        self._name = name
        self._make = load
        self._sizes: Mapping[str, int] = {}

    def load(self) -> None:
        """Load the model."""
        name, self.model = self._name, self._make()
        if self.model is None:
            raise TypeError(f"the load function of {name} returned None; it must return the model")
        self._sizes = sizes_of(self.model)
        if _is_spent(self.model, self._sizes):
            self.model = None
            raise TorchUtilsError(
                f"the load function of {name} returned a model that was released; it must load the "
                "model again, so do not cache it, for instance with functools.lru_cache"
            )

    def is_alive(self) -> bool:
        """Return True: a model in this process does not end by itself."""
        return True

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of its tensors, arrays and indexes at the load, by device."""
        return self._sizes

    def close(self) -> None:
        """Release the model, even if it is still referenced elsewhere."""
        model, self.model = self.model, None
        if model is None:
            return
        try:
            self.report = release(model)
            return
        except TypeError as error:
            problem = TypeError(f"{self._name} was only dropped, not released: {error}")
        log(WARNING, "%s", problem)
        del model  # Its last reference may be this one.
        gc.collect()
        self.report = replace(release(), errors=(problem,))


def _is_spent(model: Any, sizes: Mapping[str, int]) -> bool:
    """Return whether a model, a layer, or a part of one without memory was released before."""
    parts = [model, *(model if type(model) in (list, tuple) else ())]
    parts += (model if type(model) is dict else attributes_of(model)).values()
    torch: Any = whole_torch()
    modules = [p for p in parts if torch is not None and is_instance(p, torch.nn.Module)]
    layers = [
        child
        for root in modules
        for module, _ in tree_of(root)
        for _, child in entries_of(contents_of(module).get("_modules"))
    ]
    parts = parts if not sizes else [model]
    closed = [part for part in parts if issubclass(type(part), Resource) and part.closed]
    return bool(closed) or any(map(is_released, [*parts, *layers]))


Tenant = ThreadTenant | ModelProcess
"""A loaded model. Its host closes it once; `report` then has what was freed."""
