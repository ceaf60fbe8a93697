"""This library's exit registration: close what is open while every module is intact.

Registered when ``torch_utils`` is imported, and atexit runs last-in first-out: a program's own
callbacks, registered later, still see a live model. Destructors are only the second line.
"""

from __future__ import annotations

import atexit
import gc
import sys

from torch_utils._registry import REGISTRY
from torch_utils._runtime import PHASE

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fast_exit"]


def _close_everything() -> None:
    """Close what this process opened; from here on `is_shutting_down` is True."""
    PHASE.exiting = True
    REGISTRY.close_all()
    if _freeze is not None:
        _freeze()


class _LastChance:
    """Garbage on purpose: closes what was opened after the exit registration had already run.

    That happens in atexit callbacks that were registered before this package was imported:
    nothing registered with atexit by then would still be called. Teardown, though, begins with
    one garbage collection while all modules are whole, and that one finds this cycle.
    """

    def __init__(self) -> None:
        self._cycle = self

    def __del__(
        self,
        _is_finalizing: Callable[[], bool] = sys.is_finalizing,
        _close: Callable[[], None] = REGISTRY.close_all,
    ) -> None:
        if _is_finalizing():
            _close()
        else:  # An ordinary collection came first: the program is still in its callbacks.
            _LastChance()


def _arm_last_chance() -> None:
    """Close what is opened from now on before teardown takes anything apart."""
    gc.enable()  # A program that disabled it would go without the collection at the end.
    _LastChance()


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


def fast_exit() -> bool:
    """Let this program end without walking its heap once more. Call it once, at the start.

    A program that has imported sentence-transformers spends more than a second of its exit in
    collecting garbage that the end of the process gives back anyway. After this call, when
    every resource is closed and every atexit callback has run, the heap is frozen
    (`gc.freeze`), so that the collections of the teardown find nothing to walk.

    Everything else stays as it is: exit codes, atexit callbacks and finalizers, the joining of
    threads, the flushing of files. Young garbage is collected before. Where the program's own
    modules hold an object with a destructor, or a suspended generator, nothing is frozen and
    the exit is an ordinary one; among the objects of installed packages none is looked for.
    Never `os._exit`. A forked child inherits it. Safe from any thread.

    Returns:
        True if this call turned it on, False if it was on already.
    """
    global _freeze
    if _freeze is not None:
        return False
    from torch_utils._finalizers import has_destructors  # now: exit is late to import

    def freeze() -> None:
        gc.collect(1)
        if not has_destructors():
            gc.freeze()

    _freeze = freeze
    return True


_freeze: Callable[[], None] | None = None
atexit.register(_close_everything)
REGISTRY.on_new_process.append(_close_at_end_of_worker)
REGISTRY.on_late_entry = _arm_last_chance
if not _is_called_by_the_program():
    # Imported for the first time by an atexit callback, perhaps: what is registered now would
    # not be called any more. If not, this costs an object for each collection.
    _LastChance()
