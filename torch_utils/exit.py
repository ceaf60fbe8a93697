"""This library's exit registration: close what is open while every module is intact.

Registered when ``torch_utils`` is imported, and atexit runs last-in first-out: a program's own
callbacks, registered later, still see a live model. Destructors are only the second line.
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
    """Close what this process opened; from here on `is_shutting_down` is True."""
    PHASE.exiting = True
    REGISTRY.close_all()


class _AtTeardown:
    """Garbage on purpose: acts when every atexit callback has run and all modules are whole.

    Nothing that is registered with atexit while its callbacks run would still be called, and
    callbacks that were registered before this package was imported run after its own. Teardown,
    though, begins with one garbage collection, and that one finds this cycle.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._cycle = self

    @early_bound
    def __del__(self) -> None:
        if is_finalizing():
            self._action()
        else:  # An ordinary collection came first: the program is still in its callbacks.
            type(self)(self._action)


def _arm_last_chance() -> None:
    """Close what is opened from now on before teardown takes anything apart."""
    gc.enable()  # A program that disabled it would go without the collection at the end.
    _AtTeardown(REGISTRY.close_all)


def _is_called_by_the_program() -> bool:
    """Whether the program's own code is what runs, and not a callback of the interpreter's.

    An atexit callback is the outermost frame. Also False in other threads.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _close_at_end_of_worker() -> None:
    """Reach the end of a multiprocessing child, where Pythons before 3.13 skip atexit.

    Its own finalizers do run. The negative priority puts this one behind the joining of the
    child's own children.
    """
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, _close_everything, exitpriority=-100)


atexit.register(_close_everything)
REGISTRY.on_new_process = _close_at_end_of_worker
REGISTRY.on_late_entry = _arm_last_chance
if not _is_called_by_the_program():
    # Imported for the first time by an atexit callback, perhaps: what is registered now would
    # not be called any more. If not, this costs an object for each collection.
    _AtTeardown(REGISTRY.close_all)
