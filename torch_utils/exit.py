"""The exit callback, which closes open resources while every module is intact.

``import torch_utils`` registers it with atexit, which runs callbacks last-in first-out. So the
program's own callbacks, which are registered later, can still use the resources.
"""

from __future__ import annotations

import atexit
import gc
import sys

from torch_utils._registry import REGISTRY
from torch_utils._runtime import PHASE, early_bound, is_finalizing

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable


@early_bound
def _close_everything() -> None:
    """Close the resources of this process; from here on `is_shutting_down` is True."""
    PHASE.exiting = True
    REGISTRY.close_all()


class _AtTeardown:
    """A garbage cycle that acts after all atexit callbacks, before modules are torn down.

    Callbacks that are registered during the atexit callbacks are not called, and callbacks
    registered before this package's import run after its own. The interpreter then starts its
    teardown with a garbage collection, which finds this cycle.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._cycle = self

    @early_bound
    def __del__(self) -> None:
        if is_finalizing():
            self._action()
        else:  # An ordinary collection: the callbacks still run, so try again.
            type(self)(self._action)


def _arm_last_chance() -> None:
    """Close resources that are opened from now on, before modules are torn down."""
    gc.enable()  # Otherwise there is no collection at the end.
    _AtTeardown(REGISTRY.close_all)


def _is_called_by_the_program() -> bool:
    """Return whether the program's main module runs, rather than an atexit callback.

    The outermost frame tells: it is the callback's own in the second case. False in other threads.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _close_at_end_of_worker() -> None:
    """Close the resources of a multiprocessing child, which skips atexit before Python 3.13.

    Multiprocessing runs its own finalizers. The negative priority makes this one run after the
    child has joined its own children.
    """
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, _close_everything, exitpriority=-100)


atexit.register(_close_everything)
REGISTRY.on_new_process = _close_at_end_of_worker
REGISTRY.on_late_entry = _arm_last_chance
if not _is_called_by_the_program():
    # An atexit callback may be importing this package; atexit would then not call the new
    # callback. Otherwise this only costs an object for each collection.
    _AtTeardown(REGISTRY.close_all)
