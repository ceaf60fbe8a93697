"""Find what still holds memory that a release gave up.

The search starts at the program's variables and follows references until its time is over. What
it finds is reachable, so a garbage collection would not free it. Its cost does not grow with the
heap, unlike that of `gc.get_referrers`.

The search changes nothing and runs no code of the program. It reads tensors by torch's C++
accessors, which bypass `__torch_function__` and hooks. Variables of running functions are read from
Python 3.13 on; before, reading them would keep them alive.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator
from gc import is_tracked
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from torch_utils._oom import clear_frame
from torch_utils._release.counting import (
    Held,
    Inventory,
    storages_of,
    without_overrides,
)
from torch_utils._release.objects import (
    array_class,
    attributes_of,
    is_entered_class,
    is_instance,
    module_of,
    name_of,
    parts_of,
)
from torch_utils._runtime import DEBUG, log, reference_counts, whole_torch

SEARCH_S = 0.01
RUNNING = "probably a local variable of a running function"
_BETWEEN_LOOKS = 64  # objects between two checks of the clock
_MOST_REFERENTS = 10_000
_MOST_SUSPECTS = 64
"""A walk of the heap takes longer the more objects it looks for."""
_PACKAGE = __name__.partition(".")[0]
_OWN = __name__.rpartition(".")[0]
_CAN_READ_LOCALS = sys.version_info >= (3, 13)
_NAMED = ("another module", "an optimizer")  # holders whose name also covers their parts
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class Holders:
    """What was found: descriptions of holders, by the parts and the storages that they hold."""

    def __init__(self) -> None:
        self.of_part: dict[int, list[str]] = {}
        self.of_storage: dict[int, list[str]] = {}

    def of(self, held: Held) -> list[str]:
        """Return the holders of one storage."""
        of_part = [] if held.part is None else self.of_part.get(held.part, [])
        return of_part or self.of_storage.get(held.key, [])


def find_holders(inventory: Inventory) -> Holders:
    """Find what holds the memory that is still alive, within `SEARCH_S` seconds.

    Never raises, and runs no code of the program. Safe from any thread; it may miss references
    that other threads change meanwhile.
    """
    search = _Search(inventory)
    try:
        with without_overrides(whole_torch()):
            search.run()
    except Exception as error:
        # The search reads any object of the program; none may make a release fail.
        log(DEBUG, "the search for holders ended early: %s", type(error))
    return search.found


class _Search:
    """A breadth-first walk from the program's variables."""

    def __init__(self, inventory: Inventory) -> None:
        self._torch: Any = whole_torch()
        self._array = array_class()
        self._alive = inventory.alive()
        self._keys = {held.key for held in self._alive}
        numbers = {held.part for held in self._alive if held.part is not None}
        parts = {n: inventory.parts[n].get() for n in numbers}
        self._parts = {id(part): n for n, part in parts.items() if part is not None}
        self.found = Holders()
        self._stop = time.perf_counter() + SEARCH_S
        self._passed = 0
        self._seen: set[int] = set()
        self._pending: deque[tuple[Any, str]] = deque()

    def run(self) -> None:
        """Follow all references; raise a TimeoutError if the time is over."""
        for variables in (_variables_of_functions, _variables_of_the_main_module, _all_variables):
            for part in variables():
                self._check_time()
                self._pending.append(part)
            while self._pending:
                self._check_time()
                thing, holder = self._pending.popleft()
                try:
                    self._look_into(thing, holder)
                except Exception as error:
                    # The object may be half built, or another thread may be freeing it.
                    log(DEBUG, "a %s not searched: %s", name_of(type(thing)), type(error))
            if all(map(self.found.of, self._alive)):
                return

    def _check_time(self) -> None:
        self._passed += 1
        if not self._passed % _BETWEEN_LOOKS and time.perf_counter() > self._stop:
            raise TimeoutError

    def _look_into(self, thing: Any, holder: str) -> None:
        kind = type(thing)
        number = self._parts.get(id(thing))
        if number is not None:
            self.found.of_part.setdefault(number, []).append(holder)
        is_known = id(thing) in self._seen
        self._seen.add(id(thing))
        if self._torch is not None and is_instance(thing, self._torch.Tensor):
            self._add(thing, holder)  # Also where it is known: each of its holders is named.
            if not is_known:  # Tensors in its attributes: a wrapper class's, or the program's own.
                self._pending.extend((part, holder) for part in attributes_of(thing).values())
        elif is_known or not is_entered_class(kind):
            return
        elif is_instance(thing, self._array):
            self._check_array(thing, holder)
        elif not module_of(kind).startswith(_OWN):  # The objects of this release.
            if self._torch is not None and is_instance(thing, self._torch.nn.Module):
                holder = f"another module ({name_of(kind)})"
            elif self._torch is not None and is_instance(thing, self._torch.optim.Optimizer):
                holder = f"an optimizer ({name_of(kind)})"
            elif not holder.startswith(_NAMED) and not any(
                is_instance(thing, base) for base in _CONTAINERS
            ):
                name = name_of(kind)
                holder = f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
            self._pending.extend((part, holder) for part in self._parts_of(thing))

    def _parts_of(self, thing: Any) -> Iterator[Any]:
        if type(thing) is FunctionType:  # Its globals lead to everything.
            yield from (thing.__closure__ or (), thing.__defaults__ or (), thing.__dict__)
        elif not (type(thing) is dict and "__builtins__" in thing):
            referents = gc.get_referents(thing)
            for part in referents if len(referents) <= _MOST_REFERENTS else ():
                if is_tracked(part) or is_instance(part, self._array):
                    yield part

    def _check_array(self, array: Any, holder: str) -> None:
        base = array
        while is_instance(base, self._array) or type(base) is memoryview:
            if id(base) in self._keys:
                self.found.of_storage.setdefault(id(base), []).append(holder)
            base = base.obj if type(base) is memoryview else self._array.base.__get__(base)
        if self._torch is not None and is_instance(base, self._torch.Tensor):
            self._add(base, f"a numpy view ({holder})")

    def _add(self, tensor: Any, holder: str) -> None:
        for storage in storages_of(self._torch, tensor):
            if storage._cdata in self._keys:
                self.found.of_storage.setdefault(storage._cdata, []).append(holder)


def _variables_of_functions() -> Iterator[tuple[Any, str]]:
    for top in sys._current_frames().values() if _CAN_READ_LOCALS else ():
        frame: FrameType | None = top
        while frame is not None:
            module = dict.get(frame.f_globals, "__name__")
            is_own = type(module) is str and module.partition(".")[0] == _PACKAGE
            if not is_own and frame.f_locals is not frame.f_globals:
                # The program can set names to instances of subclasses of str.
                function = str.__str__(frame.f_code.co_name)
                for name, value in list(frame.f_locals.items()):
                    if type(name) is str:
                        yield value, f"the variable {name!r} of {function}()"
            frame = frame.f_back


def _variables_of_the_main_module() -> Iterator[tuple[Any, str]]:
    main = sys.modules.get("__main__")
    if type(main) is ModuleType:
        yield from _variables_of(vars(main))


def _all_variables() -> Iterator[tuple[Any, str]]:
    for module in list(sys.modules.values()):
        if type(module) is ModuleType:
            yield from _variables_of(vars(module))


def _variables_of(variables: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    module = dict.get(variables, "__name__")
    where = f"module {module}" if type(module) is str else "a module"
    outputs = dict.get(variables, "Out")
    if "get_ipython" in variables and type(outputs) is dict:
        for number, value in list(outputs.items()):
            yield value, f"Out[{number}]"
    for name, value in list(dict.items(variables)):
        if type(name) is str and not name.startswith("__"):
            yield value, f"the variable {name!r} of {where}"


_MOST_STEPS = 1000  # from a frame, through its variables and what they refer to


def clear_ended_frames(inventory: Inventory, holders: Holders) -> None:
    """Clear the frames of calls that have ended, if they lead to memory whose holder is unknown.

    They are those of tracebacks, such as of a stored exception. One pass over the heap finds them.
    Never raises.
    """
    try:
        _clear_ended_frames(inventory, holders)
    except Exception as error:
        # As in `find_holders`.
        log(DEBUG, "the search for ended frames ended early: %s", type(error))


def _clear_ended_frames(inventory: Inventory, holders: Holders) -> None:
    parts = [inventory.parts[number].get() for number in _lost_parts(inventory, holders)]
    wanted = {id(part) for part in parts if part is not None}
    parts.clear()
    keys = {held.key for held in inventory.alive() if not holders.of(held)}
    with without_overrides(whole_torch()):
        for one in [each for each in gc.get_objects() if type(each) is TracebackType]:
            traceback: TracebackType | None = one
            if _leads_to(one.tb_frame, wanted, keys):
                while traceback is not None:
                    clear_frame(traceback.tb_frame)
                    traceback = traceback.tb_next


def _lost_parts(inventory: Inventory, holders: Holders) -> list[int]:
    """Return the numbers of the parts that are alive although no holder is known."""
    lost = {h.part for h in inventory.alive() if h.part is not None and not holders.of(h)}
    return [n for n in sorted(lost) if inventory.parts[n].get() is not None]


def _leads_to(frame: FrameType, wanted: set[int], keys: set[int]) -> bool:
    torch: Any = whole_torch()
    pending, seen = gc.get_referents(frame), {id(frame)}
    while pending and len(seen) < _MOST_STEPS:
        thing = pending.pop()
        if id(thing) in wanted:
            return True
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if torch is not None and is_instance(thing, torch.Tensor):
            has_graph = not torch.Tensor.is_leaf.__get__(thing)  # It refers to the weights.
            if has_graph or any(s._cdata in keys for s in storages_of(torch, thing)):
                return True
        elif is_entered_class(type(thing)):
            pending += [part for part, _ in parts_of(thing)]
    return False


def name_running_functions(inventory: Inventory, holders: Holders) -> None:
    """Add functions that are running to the holders.

    References that the garbage collector cannot see are theirs. One walk of the heap counts the
    others.
    """
    numbers = _lost_parts(inventory, holders)[:_MOST_SUSPECTS]
    parts = [inventory.parts[number].get() for number in numbers]
    referrers = [one for one in gc.get_referrers(*parts) if one is not parts] if parts else []
    torch: Any = whole_torch()
    for number, part, count in zip(numbers, parts, reference_counts(parts), strict=True):
        seen = sum(inner is part for one in referrers for inner in gc.get_referents(one))
        # An autograd graph in C++ refers to tensors as well.
        if count > seen and (torch is None or not is_instance(part, torch.Tensor)):
            holders.of_part[number] = [RUNNING]
