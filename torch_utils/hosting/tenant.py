"""A loaded model in this process or in its own, and its unloading."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch_utils._runtime import log, whole_torch
from torch_utils.errors import TorchUtilsError
from torch_utils.hosting.process import ModelProcess
from torch_utils.memory import memory_snapshot
from torch_utils.releasing.objects import (
    attributes_of,
    contents_of,
    entries_of,
    is_instance,
    is_released,
)
from torch_utils.releasing.run import release, storage_bytes
from torch_utils.releasing.targets import tree_of
from torch_utils.report import CleanupReport
from torch_utils.resource import Resource

__all__ = ["ProcessTenant", "Tenant", "ThreadTenant"]

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
        self._sizes = storage_bytes(self.model)
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
        """Return the bytes of its tensors and arrays at the load, by device."""
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


class ProcessTenant:
    """A model in a process of its own.

    Args:
        start: Starts the process.
    """

    def __init__(self, start: Callable[[], ModelProcess]) -> None:
        self.report: CleanupReport = CleanupReport()
        self.model: ModelProcess | None = None
        self._start = start

    def load(self) -> None:
        """Start the process and wait until it has loaded the model."""
        self.model = self._start()
        self.model.wait_until_loaded()

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.model is not None and self.model.is_alive()

    def sizes(self) -> Mapping[str, int]:
        """Return the current memory of the process, by device."""
        if self.model is None:
            return {}
        return {**self.model.device_bytes, "host": self.model.resident_bytes()}

    def close(self) -> None:
        """End the process."""
        if self.model is None:
            return
        before, started = memory_snapshot(), time.monotonic()
        host_bytes = self.model.resident_bytes(mapped_files=False)
        self.model.end()
        self.report = CleanupReport(
            freed_bytes={**self.model.device_bytes, "host": host_bytes},
            duration_s=time.monotonic() - started,
            before=before,
            after=memory_snapshot(),
        )


Tenant = ThreadTenant | ProcessTenant
"""A loaded model. Its host closes it once; `report` then has what was freed."""
