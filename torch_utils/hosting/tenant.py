"""A loaded model in this process or in its own, and its unloading."""

from __future__ import annotations

import contextlib
import gc
import inspect
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch_utils.hosting.process import ModelProcess
from torch_utils.memory import memory_snapshot
from torch_utils.releasing.run import release, storage_bytes
from torch_utils.report import CleanupReport

__all__ = ["ProcessTenant", "Tenant", "ThreadTenant"]


class ThreadTenant:
    """A model in this process.

    Args:
        name: Its name in errors.
        load: Returns the model.
        declared: Its bytes by place; None to count those of its tensors and arrays.
    """

    def __init__(
        self, name: str, load: Callable[[], Any], declared: Mapping[str, int] | None
    ) -> None:
        self.report: CleanupReport = CleanupReport()
        self.model: Any = None
        self._name = name
        self._make = load
        self._sizes: Mapping[str, int] | None = declared

    def load(self) -> None:
        """Load the model."""
        name, self.model = self._name, self._make()
        if self.model is None:
            raise TypeError(f"the load function of {name} returned None; it must return the model")
        if inspect.iscoroutine(self.model):
            self.model.close()
            raise TypeError(f"the load function of {name} is async; it must be an ordinary one")
        if self._sizes is None:
            self._sizes = storage_bytes(self.model)

    def is_alive(self) -> bool:
        """Return True: a model in this process does not end by itself."""
        return True

    def sizes(self) -> Mapping[str, int]:
        """Return the declared bytes, or those of its tensors and arrays at the load, by place."""
        return self._sizes or {}

    def close(self) -> None:
        """Release the model, even if it is still referenced elsewhere."""
        model, self.model = self.model, None
        if model is None:
            return
        with contextlib.suppress(TypeError):  # `release` does not support its type.
            self.report = release(model)
            return
        del model  # Its last reference may be this one.
        gc.collect()
        self.report = release()


class ProcessTenant:
    """A model in a process of its own.

    Args:
        name: Its name in errors.
        load: The pickled load function.
        call_timeout_s: Seconds that a call may take; None for no limit.
        declared: Its bytes by place; None to measure its process.
    """

    def __init__(
        self,
        name: str,
        load: bytes,
        call_timeout_s: float | None,
        declared: Mapping[str, int] | None,
    ) -> None:
        self.report: CleanupReport = CleanupReport()
        self.model: ModelProcess | None = None
        self._start = partial(ModelProcess, load, name=name, call_timeout_s=call_timeout_s)
        self._declared = declared

    def load(self) -> None:
        """Start the process and wait until it has loaded the model."""
        self.model = self._start()
        self.model.wait_until_loaded()

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.model is not None and self.model.is_alive()

    def sizes(self) -> Mapping[str, int]:
        """Return the declared bytes, or the current memory of the process, by place."""
        if self._declared is not None or self.model is None:
            return self._declared or {}
        return {**self.model.device_bytes, "host": self.model.resident_bytes()}

    def close(self) -> None:
        """End the process."""
        if self.model is None:
            return
        before, started, sizes = memory_snapshot(), time.monotonic(), self.sizes()
        self.model.end()
        self.report = CleanupReport(
            freed_bytes=sizes,
            duration_s=time.monotonic() - started,
            before=before,
            after=memory_snapshot(),
        )


Tenant = ThreadTenant | ProcessTenant
"""A loaded model. Its host closes it once; `report` then has what was freed."""
