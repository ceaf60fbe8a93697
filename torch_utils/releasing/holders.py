"""Find what still holds memory that a release gave up.

The search starts at the program's variables and follows references until its time is over. What
it finds is reachable, so a garbage collection would not free it. Its cost does not grow with the
heap, unlike that of `gc.get_referrers`.

The search changes nothing and runs no code of the program. It reads tensors by torch's C++
accessors, which bypass `__torch_function__` and hooks. It does not read the saved tensors of an
autograd graph, which would unpack or recompute them. Variables of running functions are read from
Python 3.13 on; before, reading them would keep them alive.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from types import FrameType, GetSetDescriptorType, ModuleType
from typing import Any

from torch_utils._runtime import DEBUG, has_frozen, log
from torch_utils.releasing.internals import without_overrides
from torch_utils.releasing.objects import (
    DEAD_ENDS,
    Part,
    attributes_of,
    current_frames,
    find_in_class,
    is_instance,
    module_of,
    name_of,
    referents_of,
)
from torch_utils.releasing.storages import Held, storages_of
from torch_utils.report import is_variable

SEARCH_S = 0.01
_BETWEEN_LOOKS = 64  # objects between two checks of the clock
_PACKAGE = __name__.partition(".")[0]
_OWN = __name__.rpartition(".")[0]
_GRAPH = "an autograd graph"
_CAN_READ_LOCALS = sys.version_info >= (3, 13)
_UNKNOWN = (
    "C++ code, or an object that no variable leads to"
    if _CAN_READ_LOCALS
    else "a variable of a running function, perhaps"
)


class Holders:
    """The holders of storages that survived a release.

    Attributes:
        names: Descriptions of the holders, by the key of a storage.
        graph: The holder of an autograd graph, which may hold survivors as well; or empty.
        is_complete: Whether the search reached everything in its time.
    """

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}
        self.graph = ""
        self.is_complete = False

    def of(self, held: Held) -> tuple[str, ...]:
        """Return the holders of a survivor, variables first; empty if none was found."""
        found = self.names.get(held.key)
        if found:
            return tuple(sorted(dict.fromkeys(found), key=lambda holder: not is_variable(holder)))
        if self.graph:
            return (f"perhaps {_GRAPH} (reached from {self.graph})",)
        if not self.is_complete:
            return ()
        # Frozen objects cannot be listed, so this is a guess.
        frozen = ", perhaps one that gc.freeze() has put aside" if has_frozen() else ""
        return (_UNKNOWN + frozen,)

    def explain(self, survivors: list[Held]) -> bool:
        """Return whether all survivors are reachable, and so are not garbage."""
        return all(held.key in self.names for held in survivors)


def find_holders(torch: Any, survivors: list[Held], search_s: float) -> Holders:
    """Find what holds the survivors, within ``search_s`` seconds.

    Never raises, and runs no code of the program. Safe from any thread; it may miss references
    that other threads change meanwhile.
    """
    holders = Holders()
    if survivors and torch is not None and search_s > 0:
        try:
            with without_overrides(torch):
                _Search(torch, survivors, holders, time.perf_counter() + search_s).run()
        except Exception as error:
            # The search reads any object of the program; none may make a release fail.
            log(DEBUG, "the search for holders ended early: %s", type(error))
    return holders


class _Search:
    """A breadth-first walk from the program's variables."""

    def __init__(self, torch: Any, survivors: list[Held], holders: Holders, stop: float) -> None:
        self._torch = torch
        self._array: Any = getattr(sys.modules.get("numpy"), "ndarray", object)
        self._survivors = survivors
        self._keys = {held.key for held in survivors}
        self._holders = holders
        self._stop = stop
        self._seen: set[int] = set()
        self._nodes: list[Any] = []  # Keeps nodes alive, so that their ids stay unique.
        self._pending: deque[Part] = deque()

    def run(self) -> None:
        """Search the variables of functions first, then of their modules, then of all modules."""
        for roots in (_variables_of_functions, _variables_of_running_modules, _all_variables):
            self._pending.extend(roots())
            if not self._walk():
                return
            if self._holders.explain(self._survivors):
                return
        self._holders.is_complete = True

    def _walk(self) -> bool:
        """Visit the pending objects and what they refer to; return False when the time is over."""
        passed = 0
        while self._pending:
            passed += 1
            if not passed % _BETWEEN_LOOKS and time.perf_counter() > self._stop:
                return False
            thing, holder = self._pending.popleft()
            if id(type(thing)) in DEAD_ENDS or id(thing) in self._seen:
                continue
            self._seen.add(id(thing))
            try:
                self._look_into(thing, holder)
            except Exception as error:
                # The object may be half built, or another thread may be freeing it.
                log(DEBUG, "a %s not searched: %s", name_of(type(thing)), type(error))
        return True

    def _look_into(self, thing: Any, holder: str) -> None:
        kind = type(thing)
        next_functions = find_in_class(kind, "next_functions")
        if is_instance(thing, self._torch.Tensor):
            self._check_tensor(thing, holder)
        elif is_instance(thing, self._array):
            self._check_array(thing, holder)
        elif type(next_functions) is GetSetDescriptorType:
            self._check_node(thing, next_functions, holder)
        elif not module_of(kind).startswith(_OWN):  # The objects of this release.
            if is_instance(thing, self._torch.nn.Module):
                holder = f"another module ({name_of(kind)})"
            elif is_instance(thing, self._torch.optim.Optimizer):
                holder = f"an optimizer ({name_of(kind)})"
            self._pending.extend(referents_of(thing, holder))

    def _check_tensor(self, tensor: Any, holder: str) -> None:
        base = self._torch.Tensor
        self._note(tensor, holder)
        # Tensors in its attributes: those of a wrapper class, or the program's own.
        self._pending.extend((part, holder) for part in attributes_of(tensor).values())
        if base.is_leaf.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                self._note(gradient, f"the gradient of {holder}")
        elif base.grad_fn.__get__(tensor) is not None:
            self._holders.graph = self._holders.graph or holder
            self._pending.append((base.grad_fn.__get__(tensor), f"{_GRAPH} ({holder})"))

    def _check_node(self, node: Any, next_functions: Any, holder: str) -> None:
        holder = holder if holder.startswith(_GRAPH) else f"{_GRAPH} ({holder})"
        self._nodes.append(node)
        self._pending.extend((referent, holder) for referent in gc.get_referents(node))
        self._pending.extend((n, holder) for n, _ in next_functions.__get__(node) if n is not None)
        variable = find_in_class(type(node), "variable")
        if type(variable) is GetSetDescriptorType:  # A leaf whose gradient it accumulates.
            self._note(variable.__get__(node), holder)

    def _check_array(self, array: Any, holder: str) -> None:
        base = array
        while is_instance(base, self._array) or type(base) is memoryview:
            base = base.obj if type(base) is memoryview else self._array.base.__get__(base)
        if is_instance(base, self._torch.Tensor):
            self._note(base, f"a numpy view ({holder})")

    def _note(self, tensor: Any, holder: str) -> None:
        for storage in storages_of(self._torch, tensor):
            if storage._cdata in self._keys:
                self._holders.names.setdefault(storage._cdata, []).append(holder)


def _frames() -> Iterator[FrameType]:
    """Yield the running frames of all threads, except for this package's frames."""
    for top in current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            module = dict.get(frame.f_globals, "__name__")
            if type(module) is not str or module.partition(".")[0] != _PACKAGE:
                yield frame
            frame = frame.f_back


def _variables_of_functions() -> Iterator[Part]:
    for frame in _frames() if _CAN_READ_LOCALS else ():
        if frame.f_code.co_flags & CO_OPTIMIZED:
            # The program can set names to instances of subclasses of str.
            function = str.__str__(frame.f_code.co_name)
            for name, value in list(frame.f_locals.items()):
                if type(name) is str:
                    yield value, f"the variable {name!r} of {function}()"


def _variables_of_running_modules() -> Iterator[Part]:
    found = {id(frame.f_globals): frame.f_globals for frame in _frames()}
    for variables in found.values():
        yield from _variables_of(variables)
    yield vars(sys).get("last_exc") or vars(sys).get("last_value"), "sys.last_value"


def _all_variables() -> Iterator[Part]:
    for module in list(sys.modules.values()):
        if type(module) is ModuleType:
            yield from _variables_of(vars(module))


def _variables_of(variables: dict[str, Any]) -> Iterator[Part]:
    module = dict.get(variables, "__name__")
    where = f"module {module}" if type(module) is str else "a module"
    outputs = dict.get(variables, "Out")
    if "get_ipython" in variables and type(outputs) is dict:
        for number, value in list(outputs.items()):
            yield value, f"Out[{number}]"
    for name, value in list(dict.items(variables)):
        if type(name) is str and not name.startswith("__"):
            yield value, f"the variable {name!r} of {where}"
