"""Find what still holds memory that a release gave up, from the memory towards the variables.

The garbage collector knows what refers to an object; each step is one pass over the heap. The
search changes nothing and runs no code of the program. Variables of running functions are read
from Python 3.13 on; before, reading them would keep them alive.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from torch_utils._oom import clear_frame
from torch_utils._release.counting import Inventory, Root, storages_of, without_overrides
from torch_utils._release.objects import is_among, is_instance, name_of
from torch_utils._runtime import DEBUG, has_frozen, log, reference_counts, whole_torch

RUNNING = "probably a local variable of a running function"
_MOST_STEPS = 5  # from the memory to what has a name: its list, group, list of groups, attributes
_MOST_THINGS = 64  # whose referrers one pass finds; it takes longer the more there are
_PACKAGE = __name__.partition(".")[0]
_UNNAMED = frozenset(
    ("dict", "OrderedDict", "defaultdict", "list", "tuple", "set", "frozenset", "deque", "cell")
)
"""Classes whose objects are not named, but what refers to them."""

Holders = dict[int, list[str]]
"""Descriptions of what holds memory, by the memory's key."""


def find_holders(inventory: Inventory) -> Holders:
    """Find what refers to memory that is still alive.

    Never raises, and runs no code of the program. Safe from any thread; it may miss references
    that other threads change meanwhile.
    """
    found: Holders = {}
    _quietly(_search, inventory, found)
    return found


def clear_ended_frames(inventory: Inventory) -> None:
    """Clear the frames of calls that have ended, if they lead to memory that is still alive.

    They are those of tracebacks, such as of a stored exception. One pass over the heap finds them.
    Never raises.
    """
    _quietly(_clear_ended_frames, inventory)


def _quietly(function: Callable[..., None], *arguments: Any) -> None:
    try:
        with without_overrides(whole_torch()):
            function(*arguments)
    except Exception as error:
        # Any object of the program is read; none may make a release fail.
        log(DEBUG, "the search for what holds memory ended early: %s", type(error))


def _search(inventory: Inventory, found: Holders) -> None:
    torch: Any = whole_torch()
    things, keys_of = _what_is_alive(inventory)
    hides_variables = has_frozen()  # which looks at each object that is frozen
    known: defaultdict[int, set[int]] = defaultdict(set)  # what each referrer leads to
    for step in range(_MOST_STEPS):
        del things[_MOST_THINGS:]
        unnamed: list[Any] = []
        keys_of_unnamed: dict[int, set[int]] = {}
        visible = Counter[int]()
        referrers = {id(one): one for one in gc.get_referrers(*things)}
        if hides_variables:
            referrers.update((id(one), one) for one in _variables_of_modules())
        for referrer in referrers.values():
            if referrer is things or type(referrer) is FrameType:  # Python 3.10 shows frames.
                continue
            met = Counter(id(one) for one in gc.get_referents(referrer) if id(one) in keys_of)
            visible.update(met)
            lost = set[int]()
            for one in met:
                keys = keys_of[one] - known[id(referrer)]
                names = _names_of(referrer, one)
                for key in keys if names else ():
                    found.setdefault(key, []).extend(names or ())
                lost |= keys - found.keys() if names is None else set()
            known[id(referrer)].update(*(keys_of[one] for one in met))
            if lost:
                unnamed.append(referrer)
                keys_of_unnamed[id(referrer)] = lost
        referrer = None
        referrers.clear()
        for value, name in _variables_of_functions():
            for key in keys_of.get(value, ()):
                found.setdefault(key, []).append(name)
        for number, count in enumerate(reference_counts(things) if step == 0 else ()):
            # The garbage collector does not see variables of functions, nor autograd graphs in C++,
            # which refer to tensors.
            thing = things[number]
            is_tensor = torch is not None and is_instance(thing, torch.Tensor)
            if count > visible[id(thing)] and not is_tensor:
                for key in keys_of[id(thing)]:
                    found[key] = found.get(key) or [RUNNING]
        things, keys_of = unnamed, keys_of_unnamed


def _what_is_alive(inventory: Inventory) -> tuple[list[Any], dict[int, set[int]]]:
    """Return the objects that hold memory, the largest first, and the memory's keys by their ids.

    What stays whole is the object; for other memory these are tensors that share it.
    """
    things: list[Any] = []
    keys_of: defaultdict[int, set[int]] = defaultdict(set)
    without_object = set()
    for held in inventory.alive():
        part = None if held.part is None else inventory.parts[held.part].get()
        if part is None:
            without_object.add(held.key)
            continue
        if id(part) not in keys_of:
            things.append(part)
        keys_of[id(part)].add(held.key)
    torch: Any = whole_torch()
    if without_object and torch is not None:
        kinds = (torch.Tensor, torch.nn.Parameter)
        for tensor in gc.get_referrers(*kinds):  # Objects refer to their class.
            if is_among(type(tensor), kinds):
                for storage in storages_of(torch, tensor):
                    if storage._cdata in without_object:
                        things.append(tensor)
                        keys_of[id(tensor)].add(storage._cdata)
    return things, keys_of


def _names_of(referrer: Any, wanted: int) -> list[str] | None:
    """Describe what refers to the object with an id; None for a container."""
    kind = type(referrer)
    name = name_of(kind)
    if kind is dict:
        module = dict.get(referrer, "__name__")
        known = sys.modules.get(module) if type(module) is str else None
        if type(known) is not ModuleType or vars(known) is not referrer:
            return None
        named = [key for key, value in list(referrer.items()) if id(value) == wanted]
        return [f"the variable {key!r} of module {module}" for key in named]
    if name in _UNNAMED:
        return None
    if kind is FunctionType:
        return [f"the function {referrer.__qualname__}()"]
    torch: Any = whole_torch()
    if torch is not None and is_instance(referrer, torch.nn.Module):
        return [f"another module ({name})"]
    if torch is not None and is_instance(referrer, torch.optim.Optimizer):
        return [f"an optimizer ({name})"]
    return [f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"]


def _variables_of_modules() -> list[Any]:
    """Return the variables of modules, and the lists and dictionaries in them."""
    modules = [one for one in list(sys.modules.values()) if type(one) is ModuleType]
    values = [value for module in modules for value in list(vars(module).values())]
    return [*map(vars, modules), *(one for one in values if type(one) in (dict, list))]


def _variables_of_functions() -> Iterator[tuple[int, str]]:
    """Yield the ids of the values of variables of running functions, and their descriptions."""
    frames = list(sys._current_frames().values()) if sys.version_info >= (3, 13) else []
    while frames:
        # One of them is this function's own. A variable that still refers to it at the end would
        # make a cycle, which keeps the variables of all its callers.
        frame: FrameType | None = frames.pop()
        while frame is not None:
            if frame.f_locals is not frame.f_globals:
                function = frame.f_code.co_name
                for name, value in list(frame.f_locals.items()):
                    yield id(value), f"the variable {name!r} of {function}()"
                value = None
            frame = frame.f_back


def _clear_ended_frames(inventory: Inventory) -> None:
    keys = {held.key for held in inventory.alive()}
    for one in [each for each in gc.get_objects() if type(each) is TracebackType]:
        behind = Inventory(most_looks=1000)
        behind.count([Root(gc.get_referents(one.tb_frame), "")])
        # A graph refers to the weights in C++.
        if behind.has_graph or any(held.key in keys for held in behind.alive()):
            for frame, _ in walk_tb(one):
                clear_frame(frame)
