"""Count the memory of what a release empties, and find what still holds it.

A weak reference to a tensor dies while a numpy view or an autograd graph still keeps the memory. A
weak reference to the tensor's storage, which holds the memory, does not.

Reference counts decide how far the counting goes, as they decide what Python frees: a part is
entered if nothing but the released objects refers to it. Another part stays whole, so it is counted
as one: it may still go, as a part of a cycle. Nothing here decides what is emptied.

The search for holders goes from the memory towards the variables. The garbage collector knows what
refers to an object; each step is one pass over the heap. It changes nothing and runs no code of the
program. Variables of running functions are read from Python 3.13 on; before, reading them would
keep them alive.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from traceback import walk_tb
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple
from weakref import ref

from torch_utils._oom import clear_frame
from torch_utils._release import objects
from torch_utils._release.objects import Root, bases_of, is_instance, name_of
from torch_utils._runtime import DEBUG, log, private, reference_counts, whole_torch


@contextmanager
def without_overrides(torch: Any) -> Iterator[None]:
    """Disable overrides of torch's functions in this thread.

    Tensor subclasses and modes, such as a default device or fake tensors, override functions.
    """
    functions = private(torch, "_C.DisableTorchFunction") or nullcontext
    dispatch = private(torch, "_C._DisableTorchDispatch") or nullcontext
    with functions(), dispatch():
        yield


_INDICES = [f"{kind}_indices" for kind in ("", "crow", "col", "ccol", "row")]


class _Arrays:
    """The functions of torch.UntypedStorage for weak references, for those to numpy arrays."""

    @staticmethod
    def _expired(weak: Any) -> bool:
        return weak() is None

    @staticmethod
    def _free_weak_ref(weak: Any) -> None: ...


@dataclass(slots=True)
class Held:
    """One storage, or one array, that a release gives up.

    One object for each, because more of them would set off garbage collections.

    Attributes:
        what: Its name in reports.
        nbytes: Its size in bytes.
        device: "host" or torch's name of the device, such as "cuda:0".
        key: The address of the C++ object; the id of an array.
        is_expected: Whether it should be freed. The parameters of an optimizer belong to others.
        part: The part that stays whole and holds it, or None.
        kind: The class with the functions for weak references to it.
        weak: A weak reference to it.
    """

    what: str
    nbytes: int
    device: str
    key: int
    is_expected: bool
    part: Part | None
    kind: Any
    weak: Any

    def __del__(self) -> None:
        self.kind._free_weak_ref(self.weak)


class Part(NamedTuple):
    """An object to which something besides the released objects refers.

    Attributes:
        name: Its name in reports.
        get: Returns the object; None if it is gone, or cannot be weakly referenced.
    """

    name: str
    get: Callable[[], Any]


class _Visit(NamedTuple):
    """An object whose parts are to be examined."""

    thing: Any
    name: str
    root: Root
    is_expected: bool


class Inventory:
    """The memory that a release is about to give up, each storage once. Not thread-safe.

    Args:
        follows_functions: Whether closures, bound methods and partial functions are examined.
        most_looks: How many parts of objects that stay are examined; the memory behind others is
            not counted.

    Attributes:
        freed: The bytes that were freed, by device, when `alive` was last called.
        met: How many references to a part were met, by its id, if there are several.
        is_partial: Whether there is memory whose size is unknown, such as packed weights.
        has_graph: Whether there is a tensor with an autograd graph.
    """

    def __init__(self, *, follows_functions: bool = True, most_looks: int = 20_000) -> None:
        torch: Any = whole_torch()
        self._torch = torch
        self._follows_functions = follows_functions
        plain = () if torch is None else (torch.nn.Parameter, torch.Tensor)
        self._plain = frozenset(map(id, plain))
        self._counts_storages = private(torch, "UntypedStorage._weak_ref") is not None
        self._kinds: dict[int, tuple[int, type]] = {}
        self._held: dict[int, Held] = {}
        self._looks_left = most_looks
        self._part: Part | None = None  # what is being counted as a whole
        self.freed = Counter[str]()
        self.met: Counter[int] = Counter()
        self.is_partial = self.has_graph = False

    def kind_of(self, kind: type) -> int:
        """Return how objects of a class are counted."""
        known = self._kinds.get(id(kind))
        if known is None:
            known = self._kinds[id(kind)] = objects.kind_of(kind, self._follows_functions), kind
        return known[0]

    # Counting

    def count(self, roots: list[Root]) -> None:
        """Count what objects hold, as far as nothing else refers to it.

        A part is entered when all references to it were met on the way. What remains in the end is
        counted part by part. Call this inside `without_overrides`.
        """
        known: set[int] = set()
        pending: list[_Visit] = []
        for root in roots:
            known.add(id(root.thing))
            is_own = self.kind_of(type(root.thing)) != objects.TRAINING
            self._enter(_Visit(root.thing, root.name, root, is_own), pending)
        others: dict[int, _Visit] = {}
        self.met = met = Counter[int]()
        while pending:
            thing, name, root, is_expected = pending.pop()
            is_training = self.kind_of(type(root.thing)) == objects.TRAINING
            # Lists of plain values: tuples would set off garbage collections.
            parts: list[Any] = []
            labels: list[str] = []
            for part, label in objects.parts_of(thing):
                if id(part) in known:  # It is emptied itself.
                    root.is_found |= self.kind_of(type(part)) in objects.MEMORY
                elif self.kind_of(type(part)):
                    parts.append(part)
                    labels.append(label)
            thing = part = None
            shared = []
            for index, count in enumerate(reference_counts(parts)):
                label, is_own = labels[index], is_expected
                if is_training:
                    # Only the state of an optimizer is its own, without the parameters in it.
                    is_own = label == ".state" or (is_expected and label != ".keys()")
                visit = _Visit(parts[index], (name + label)[: objects.LONGEST_NAME], root, is_own)
                if count == 1:
                    self._enter(visit, pending)
                else:
                    key = id(visit.thing)
                    if key not in others or not others[key].is_expected:
                        others[key] = visit
                    met[key] += 1
                    shared.append(key)
            parts.clear()
            visit = None  # type: ignore[assignment]
            for key in shared:
                # The visit refers to it as well.
                if key in others and reference_counts([others[key].thing])[0] - 1 <= met[key]:
                    self._enter(others.pop(key), pending)
        rest = list(filter(attrgetter("is_expected"), others.values()))
        known.update(map(id, map(attrgetter("thing"), rest)))
        for visit in rest:
            self._count_whole(visit, known)

    def _enter(self, visit: _Visit, pending: list[_Visit]) -> None:
        """Count a tensor or an array; add another object to those whose parts are examined."""
        kind = self.kind_of(type(visit.thing))
        # An object in a container may be a companion, such as a preprocessor with an array.
        visit.root.is_found |= kind in objects.MEMORY or (
            kind == objects.ARRAY and visit.root.is_passed
        )
        self.is_partial = self.is_partial or kind == objects.PACKED
        if kind == objects.TENSOR:
            self._add_tensor(visit.thing, visit.name, visit.is_expected)
        if kind == objects.ARRAY:
            self._add_array(visit.thing, visit.name, visit.is_expected)
        elif kind != objects.TENSOR or id(type(visit.thing)) not in self._plain:
            pending.append(visit)
        else:
            # Reading ``__dict__`` would create it. Torch may hide what a tensor refers to.
            inner = gc.get_referents(visit.thing)
            if not inner or dict in map(type, inner):
                pending.append(visit)

    def _count_whole(self, visit: _Visit, seen: set[int]) -> None:
        """Count what an object holds to which something else refers, within ``most_looks``."""
        self._part = Part(visit.name, lambda: None)
        with suppress(TypeError):  # A list, a dictionary, an object with slots.
            self._part = Part(visit.name, ref(visit.thing))
        pending: list[_Visit] = []
        self._enter(visit, pending)
        if not visit.root.is_passed:  # What lies behind it does not belong to a companion.
            visit = visit._replace(root=Root(None, ""))
        while pending and self._looks_left > 0:
            for inner, _ in objects.parts_of(pending.pop().thing):
                if self._looks_left <= 0:
                    break
                if id(inner) not in seen and self.kind_of(type(inner)):
                    self._looks_left -= 1
                    seen.add(id(inner))
                    self._enter(visit._replace(thing=inner), pending)
        self._part = None

    def _add_tensor(self, tensor: Any, name: str, is_expected: bool) -> None:
        """Count a tensor and its gradient."""
        if not self._counts_storages:
            return
        base = self._torch.Tensor
        self._add_storages(tensor, name, is_expected)
        is_leaf = base.is_leaf.__get__(tensor)
        self.has_graph = self.has_graph or not is_leaf
        if is_leaf or base.retains_grad.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                self._add_storages(gradient, f"{name}.grad", is_expected)

    def _add_storages(self, tensor: Any, name: str, is_expected: bool) -> None:
        torch = self._torch
        storages = storages_of(torch, tensor)
        self.is_partial = self.is_partial or not storages  # Opaque layouts, such as mkldnn's.
        for storage in storages:
            try:
                device = storage.device
                if device.type != "meta" and storage.data_ptr():
                    what = (name, storage.nbytes(), name_of_device(device), storage._cdata)
                    weak = storage._weak_ref()
                    self._add(Held(*what, is_expected, self._part, torch.UntypedStorage, weak))
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                # Fake and functional tensors have no real storage.
                log(DEBUG, "%s: its storage cannot be counted: %r", name, error)

    def _add_array(self, array: Any, name: str, is_expected: bool) -> None:
        """Count a numpy array that owns its memory, or the one that an array is a view of."""
        # A program may hide numpy from imports.
        kind: Any = next(base for base in bases_of(type(array)) if name_of(base) == "ndarray")
        while is_instance(base := kind.base.__get__(array), kind):
            array = base
        if base is None:
            what = (name, kind.nbytes.__get__(array), "host", id(array))
            self._add(Held(*what, is_expected, self._part, _Arrays, ref(array)))

    def _add(self, held: Held) -> None:
        known = self._held.get(held.key)
        if held.nbytes and (known is None or (held.is_expected and not known.is_expected)):
            self._held[held.key] = held

    # Results

    def alive(self) -> list[Held]:
        """Return what should be freed but still exists, the largest first."""
        alive = []
        for key in list(self._held):  # Pairs would set off garbage collections.
            held = self._held[key]
            if held.kind._expired(held.weak):
                self.freed[held.device] += held.nbytes
                del self._held[key]
            elif held.is_expected:
                alive.append(held)
        return sorted(alive, key=attrgetter("nbytes"), reverse=True)

    def blocks(self) -> dict[Hashable, tuple[str, int]]:
        """Return the device and the bytes of each piece of memory that still exists, by its key."""
        return {held.key: (held.device, held.nbytes) for held in self.alive()}


def inventory_of(thing: Any) -> Inventory:
    """Count an object's tensors and numpy arrays, without changing it.

    Packed weights, the memory of other libraries, and what lies behind more than 20,000
    shared objects are not counted.
    """
    inventory = Inventory()
    with without_overrides(whole_torch()):
        inventory.count([Root(thing, name_of(type(thing)))])
    return inventory


@lru_cache(maxsize=100)
def name_of_device(device: Any) -> str:
    """Return "host" for the CPU, otherwise torch's name of a device."""
    return "host" if device.type == "cpu" else str(device)


def storages_of(torch: Any, tensor: Any) -> list[Any]:
    """Return the storages of a tensor: one, those of a sparse tensor's parts, or none.

    Call it inside `without_overrides`. The attributes of a wrapper tensor are not included.
    """
    base = torch.Tensor
    layout = base.layout.__get__(tensor)
    try:
        if layout == torch.strided:
            return [base.untyped_storage(tensor)]
    except (RuntimeError, NotImplementedError):  # Opaque layouts, such as mkldnn's, have none.
        return []
    found = []
    for name in ("values", "_values", *_INDICES):
        with suppress(RuntimeError, AttributeError, NotImplementedError):
            # No layout has all of them.
            found.append(base.untyped_storage(getattr(base, name)(tensor)))
    return found


# What holds it

RUNNING = "probably a local variable of a running function"
_MOST_STEPS = 5  # from the memory to what has a name: its list, group, list of groups, attributes
_MOST_THINGS = 64  # whose referrers one pass finds; it takes longer the more there are
_UNNAMED = frozenset(
    ("dict", "OrderedDict", "defaultdict", "list", "tuple", "set", "frozenset", "deque", "cell")
)
"""Classes whose objects are not named, but what refers to them."""

Holders = dict[int, list[str]]
"""Descriptions of what holds memory, by the memory's key."""


@contextmanager
def _reading() -> Iterator[None]:
    """Read objects of the program, of which none may make a release fail."""
    try:
        with without_overrides(whole_torch()):
            yield
    except Exception as error:
        # As said above.
        log(DEBUG, "the search for what holds memory ended early: %s", type(error))


def find_holders(inventory: Inventory) -> Holders:
    """Find what refers to memory that is still alive.

    Never raises, and runs no code of the program. Safe from any thread; it may miss references
    that other threads change meanwhile.
    """
    torch: Any = whole_torch()
    found: Holders = {}
    with _reading():
        things, keys_of = _what_is_alive(inventory)
        known: defaultdict[int, set[int]] = defaultdict(set)  # what each referrer leads to
        for step in range(_MOST_STEPS):
            del things[_MOST_THINGS:]
            unnamed: list[Any] = []
            keys_of_unnamed: dict[int, set[int]] = {}
            visible = Counter[int]()
            for referrer in gc.get_referrers(*things):
                if referrer is things or type(referrer) is FrameType:  # Python 3.10 shows frames.
                    continue
                met = Counter(id(one) for one in gc.get_referents(referrer) if id(one) in keys_of)
                visible.update(met)
                lost = set[int]()
                for one in met:
                    keys = keys_of[one] - known[id(referrer)]
                    names = _names_of(referrer, one)
                    if names is None:
                        lost |= keys - found.keys()
                    for key in keys if names else ():
                        found.setdefault(key, []).extend(names or ())
                known[id(referrer)].update(*(keys_of[one] for one in met))
                if lost:
                    unnamed.append(referrer)
                    keys_of_unnamed[id(referrer)] = lost
            referrer = None
            for value, name in _variables_of_functions():
                for key in keys_of.get(value, ()):
                    found.setdefault(key, []).append(name)
            for number, count in enumerate(reference_counts(things) if step == 0 else ()):
                # The garbage collector does not see variables of functions, nor autograd graphs in
                # C++, which refer to tensors.
                thing = things[number]
                is_tensor = torch is not None and is_instance(thing, torch.Tensor)
                if count > visible[id(thing)] and not is_tensor:
                    for key in keys_of[id(thing)]:
                        found[key] = found.get(key) or [RUNNING]
            things, keys_of = unnamed, keys_of_unnamed
    return found


def clear_ended_frames(inventory: Inventory) -> None:
    """Clear the frames of calls that have ended, if they lead to memory that is still alive.

    They are those of tracebacks, such as of a stored exception. One pass over the heap finds them.
    Never raises.
    """
    with _reading():
        keys = {held.key for held in inventory.alive()}
        for one in [each for each in gc.get_objects() if type(each) is TracebackType]:
            behind = Inventory(most_looks=1000)
            behind.count([Root(gc.get_referents(one.tb_frame), "")])
            # A graph refers to the weights in C++.
            if behind.has_graph or any(held.key in keys for held in behind.alive()):
                for frame, _ in walk_tb(one):
                    clear_frame(frame)


def _what_is_alive(inventory: Inventory) -> tuple[list[Any], dict[int, set[int]]]:
    """Return the objects that hold memory, the largest first, and the memory's keys by their ids.

    What stays whole is the object; for other memory these are tensors that share it.
    """
    things: list[Any] = []
    keys_of: defaultdict[int, set[int]] = defaultdict(set)
    without_object = set()
    for held in inventory.alive():
        part = None if held.part is None else held.part.get()
        if part is None:
            without_object.add(held.key)
            continue
        if id(part) not in keys_of:
            things.append(part)
        keys_of[id(part)].add(held.key)
    torch: Any = whole_torch()
    if without_object and torch is not None:
        kinds = [torch.Tensor, torch.nn.Parameter]
        for tensor in gc.get_referrers(*kinds):  # Objects refer to their class.
            if id(type(tensor)) in map(id, kinds):
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


def _variables_of_functions() -> Iterator[tuple[int, str]]:
    """Yield the ids of the values of variables of running functions, and their descriptions."""
    frames = list(sys._current_frames().values()) if sys.version_info >= (3, 13) else []
    while frames:
        # One of them is this function's own. A variable that still refers to it at the end would
        # make a cycle, which keeps the variables of all its callers.
        frame: FrameType | None = frames.pop()
        while frame is not None:
            if frame.f_locals is not frame.f_globals:
                for name, value in list(frame.f_locals.items()):
                    yield id(value), f"the variable {name!r} of {frame.f_code.co_name}()"
                value = None
            frame = frame.f_back
