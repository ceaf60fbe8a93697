"""A loaded model in this process or in its own, and its unloading."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch_utils._release.counting import sizes_of
from torch_utils._release.objects import is_instance, is_released, parts_of
from torch_utils._release.run import release
from torch_utils._report import CleanupReport
from torch_utils._resource import Resource
from torch_utils._runtime import log, whole_torch
from torch_utils.errors import TorchUtilsError
from torch_utils.hosting.process import ModelProcess

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
    torch: Any = whole_torch()
    seen: set[int] = set()
    pending = [model]
    while pending:
        thing = pending.pop()
        is_own = thing is model or not sizes
        if is_released(thing) or (is_own and is_instance(thing, Resource) and thing.closed):
            return True
        is_module = torch is not None and is_instance(thing, torch.nn.Module)
        if id(thing) not in seen and (thing is model or is_module):
            pending += [part for part, _ in parts_of(thing)]
        seen.add(id(thing))
    return False


Tenant = ThreadTenant | ModelProcess
"""A loaded model. Its host closes it once; `report` then has what was freed."""
