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
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch_utils._runtime import DEBUG, log
from torch_utils.releasing.objects import (
    Part,
    attributes_of,
    is_instance,
    module_of,
    name_of,
)
from torch_utils.releasing.storages import Held, storages_of, without_overrides

SEARCH_S = 0.01
_BETWEEN_LOOKS = 64  # objects between two checks of the clock
_MOST_REFERENTS = 10_000
_PACKAGE = __name__.partition(".")[0]
_OWN = __name__.rpartition(".")[0]
_CAN_READ_LOCALS = sys.version_info >= (3, 13)
_NAMED = ("another module", "an optimizer")  # holders whose name also covers their parts
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def find_holders(torch: Any, survivors: list[Held]) -> dict[int, list[str]]:
    """Find what holds the survivors, within `SEARCH_S` seconds.

    Never raises, and runs no code of the program. Safe from any thread; it may miss references
    that other threads change meanwhile.

    Returns:
        Descriptions of the holders, by the key of a storage.
    """
    search = _Search(torch, survivors)
    try:
        with without_overrides(torch):
            search.run()
    except Exception as error:
        # The search reads any object of the program; none may make a release fail.
        log(DEBUG, "the search for holders ended early: %s", type(error))
    return search.names


class _Search:
    """A breadth-first walk from the program's variables."""

    def __init__(self, torch: Any, survivors: list[Held]) -> None:
        self._torch = torch
        self._array: Any = getattr(sys.modules.get("numpy"), "ndarray", object)
        self._keys = {held.key for held in survivors}
        self.names: dict[int, list[str]] = {}
        self._stop = time.perf_counter() + SEARCH_S
        self._passed = 0
        self._seen: set[int] = set()
        self._pending: deque[Part] = deque()

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
            if self._keys <= self.names.keys():
                return

    def _check_time(self) -> None:
        self._passed += 1
        if not self._passed % _BETWEEN_LOOKS and time.perf_counter() > self._stop:
            raise TimeoutError

    def _look_into(self, thing: Any, holder: str) -> None:
        kind = type(thing)
        is_known = id(thing) in self._seen
        self._seen.add(id(thing))
        if is_instance(thing, self._torch.Tensor):
            self._add(thing, holder)  # Also where it is known: each of its holders is named.
            if not is_known:  # Tensors in its attributes: a wrapper class's, or the program's own.
                self._pending.extend((part, holder) for part in attributes_of(thing).values())
        elif is_known:
            return
        elif is_instance(thing, self._array):
            self._check_array(thing, holder)
        elif is_instance(thing, ModuleType) or is_instance(thing, type):
            return  # They lead to everything.
        elif not module_of(kind).startswith(_OWN):  # The objects of this release.
            if is_instance(thing, self._torch.nn.Module):
                holder = f"another module ({name_of(kind)})"
            elif is_instance(thing, self._torch.optim.Optimizer):
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
            base = base.obj if type(base) is memoryview else self._array.base.__get__(base)
        if is_instance(base, self._torch.Tensor):
            self._add(base, f"a numpy view ({holder})")

    def _add(self, tensor: Any, holder: str) -> None:
        for storage in storages_of(self._torch, tensor):
            if storage._cdata in self._keys:
                self.names.setdefault(storage._cdata, []).append(holder)


def _variables_of_functions() -> Iterator[Part]:
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


def _variables_of_the_main_module() -> Iterator[Part]:
    main = sys.modules.get("__main__")
    if type(main) is ModuleType:
        yield from _variables_of(vars(main))
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
