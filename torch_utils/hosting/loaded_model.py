"""A loaded model in this process or in its own: its memory, its sleep and its unloading."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch_utils._memory import empty_pinned_cache
from torch_utils._oom import clear_exception_frames
from torch_utils._registry import ensure_ran
from torch_utils._release.objects import Kinds, is_instance, is_namespace, is_released
from torch_utils._release.run import release
from torch_utils._release.storages import Storages, storages_in
from torch_utils._report import CleanupReport
from torch_utils._resource import Resource
from torch_utils._runtime import is_shutting_down, log, whole_torch
from torch_utils.errors import TorchUtilsError, repr_of
from torch_utils.hosting.footprint import ASLEEP, Footprint, by_device
from torch_utils.hosting.process import ModelProcess
from torch_utils.hosting.sleep import Offloaded, offload, synchronize

__all__ = ["LoadedModel", "ThreadModel"]

WARNING = 30
_READING_S = 1.0
"""How long closing waits for a thread that measures the model, in seconds."""


class ThreadModel:
    """A model in this process.

    Args:
        name: Its name in errors.
        load: Returns the model.

    Attributes:
        storages: Its memory when it was last measured; later, what of that still exists.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.report: CleanupReport = CleanupReport()
        self.model: Any = None
        self.storages: Storages = Storages()
        self._name = name
        self._make = load
        self._footprint: Footprint = {}
        self._sizes: dict[str, int] = {}
        self._offloaded: Offloaded | None = None
        self.asleep_bytes: int = 0  # of host memory, which belong on a device
        self._reading = threading.Lock()  # Measuring refers to parts, which would stay awake.

    def load(self) -> None:
        """Load the model."""
        name = self._name
        self.model = ensure_ran(self._make(), f"load {name} with a plain function")
        if self.model is None:
            raise TypeError(f"the load function of {name} returned None; it must return the model")
        self.measure()
        if not self.is_alive() or any(map(is_released, _parts_of(self.model))):
            self.model = None
            raise TorchUtilsError(
                f"the load function of {name} returned a model that was released; it must load the "
                "model again, so do not cache it, for instance with functools.lru_cache"
            )

    def is_alive(self) -> bool:
        """Return whether the program has neither released nor closed the model itself."""
        model = self.model
        closed = Resource.closed.__get__  # Not the program's own property.
        return not (is_released(model) or (is_instance(model, Resource) and closed(model)))

    def measure(self) -> None:
        """Count the model's tensors and arrays again, unless another thread does."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            if self.model is not None:
                self.storages = storages_in(self.model)
                self._footprint = self.storages.footprint()
                self._sizes = by_device(self.footprint())
        finally:
            self._reading.release()

    def footprint(self) -> Footprint:
        """Return its memory when it was last measured."""
        if not self.is_asleep:
            return self._footprint
        awake = {key: block for key, block in self._footprint.items() if block[0] != "host"}
        return {**awake, self: (ASLEEP, self.asleep_bytes)}

    def sizes(self) -> dict[str, int]:
        """Return its bytes on the host and on each device when it was last measured."""
        return self._sizes

    @property
    def is_asleep(self) -> bool:
        """Whether its values are in host memory."""
        return self.asleep_bytes > 0

    def sleep(self) -> str:
        """Move the model to host memory; return why that is impossible, or an empty string."""
        try:
            with self._reading:
                offloaded = offload(self.model)
        except Exception as error:
            # Drivers raise what they like, and a model that cannot sleep is unloaded.
            clear_exception_frames(error)
            return repr_of(error) if not isinstance(error, TypeError) else str(error)
        if offloaded.nbytes:
            self._offloaded, self.asleep_bytes = offloaded, offloaded.host_bytes
            self.measure()
            return ""
        left = ", ".join(one.what for one in offloaded.left[:3])
        return f"other objects refer to {left}" if left else "no device has memory of it"

    def wake(self) -> None:
        """Move the model back to its devices. If that raises, it is still asleep as a whole."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded, self.asleep_bytes = None, 0
            self.measure()

    def close(self) -> None:
        """Release the model, even if it is still referenced elsewhere."""
        if not is_shutting_down():
            self.measure()  # Callers may keep parts.
        # Another thread may be measuring it. At shutdown that thread may never end.
        has_lock = self._reading.acquire(timeout=_READING_S)
        model, self.model = self.model, None
        if has_lock:
            self._reading.release()
        if model is None:
            return
        offloaded, self._offloaded = self._offloaded, None
        torch: Any = whole_torch()
        try:
            if torch is not None and not is_shutting_down():
                # Torch could lend memory that a side stream still uses.
                names = {device for device, _ in self._footprint.values()}
                synchronize(torch, [torch.device(name.replace("host", "cpu")) for name in names])
            self.report = release(model)
        except TypeError as error:
            problem = TypeError(f"{self._name} was only dropped, not released: {error}")
            log(WARNING, "%s", problem)
            del model  # Its last reference may be this one.
            gc.collect()
            self.report = replace(release(), errors=(problem,))
        if offloaded is not None:  # torch keeps pinned memory.
            empty_pinned_cache(torch)


def _parts_of(model: Any) -> Iterator[Any]:
    """Yield what a model refers to, by itself or in its dictionaries, such as submodules."""
    kinds, pending, seen = Kinds(), [model], set[int]()
    while pending:
        for part in kinds.referents(pending.pop()):
            yield part
            if type(part) is dict and id(part) not in seen and not is_namespace(part):
                seen.add(id(part))
                pending.append(part)


LoadedModel = ThreadModel | ModelProcess
"""A loaded model. Its host closes it once; `report` then has what was freed."""
