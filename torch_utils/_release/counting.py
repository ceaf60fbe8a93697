"""Find what a release empties, and count its memory by weak references to storages.

A weak reference to a tensor dies while a numpy view or an autograd graph still keeps the memory. A
weak reference to the tensor's storage, which holds the memory, does not.

Reference counts decide how far the counting goes, as they decide what Python frees: a part is
entered if nothing but the released objects refers to it. Another part stays whole, so it is counted
as one: it may still go, as a part of a cycle. Nothing here decides what is emptied.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from gc import get_referents
from typing import Any, NamedTuple
from weakref import ref

from torch_utils._release.objects import (
    FUNCTIONS,
    NOT_ENTERED,
    NOT_ENTERED_PACKAGES,
    SUSPENDABLE,
    array_class,
    attributes_of,
    bases_of,
    class_contents,
    dictionary_slot,
    find_in_class,
    is_among,
    is_instance,
    is_released,
    items_of,
    module_of,
    name_of,
    parts_of,
    slots_of,
)
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


_SPARSE_PARTS = (
    *("_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
    "values",
)
_LONGEST_NAME = 200  # The names of deeply nested parts would fill the memory.


class _Arrays:
    """The functions of torch.UntypedStorage that `Held` uses, for numpy arrays."""

    _weak_ref = ref

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
        part: The number of the part that stays whole and holds it, or None.
    """

    what: str
    nbytes: int
    device: str
    key: int
    is_expected: bool
    part: int | None
    _kind: Any
    _weak: Any

    def is_gone(self) -> bool:
        """Return whether it was freed."""
        return bool(self._kind._expired(self._weak))

    def __del__(self) -> None:
        self._kind._free_weak_ref(self._weak)


class Part(NamedTuple):
    """An object to which something besides the released objects refers.

    Attributes:
        name: Its name in reports.
        get: Returns the object; None if it is gone, or cannot be weakly referenced.
    """

    name: str
    get: Callable[[], Any]


@dataclass(slots=True)
class Root:
    """An object that was passed, by itself or in a container.

    Attributes:
        is_passed: Whether by itself.
        close: What closes it, if anything does.
        is_found: Whether it holds memory: a tensor, a module, an array, packed weights.
        is_training: Whether most of what it refers to belongs to others, as in an optimizer.
    """

    thing: Any
    name: str
    is_passed: bool = True
    close: Callable[[], Any] | None = None
    is_found: bool = False
    is_training: bool = False


class _Visit(NamedTuple):
    """An object whose parts are to be examined."""

    thing: Any
    name: str
    root: Root
    is_expected: bool


SKIPPED, TENSOR, ARRAY, PACKED, MODULE, OTHER = range(6)
_MEMORY = (TENSOR, PACKED, MODULE)  # What makes its owner one that is emptied.


class Inventory:
    """The memory that a release is about to give up, each storage once. Not thread-safe.

    Args:
        follows_functions: Whether closures, bound methods and partial functions are examined.
        most_looks: How many parts of objects that stay are examined; the memory behind others is
            not counted.

    Attributes:
        parts: What may stay whole.
        met: How many references to a part were met, by its id, if there are several.
        is_partial: Whether there is memory whose size is unknown, such as packed weights.
        has_graph: Whether there is a tensor with an autograd graph.
    """

    def __init__(self, *, follows_functions: bool = True, most_looks: int = 20_000) -> None:
        torch: Any = whole_torch()
        self._torch = torch
        self._follows_functions = follows_functions
        self._array = array_class()
        self._counts_storages = private(torch, "UntypedStorage._weak_ref") is not None
        self._kinds: dict[int, tuple[int, type]] = {}
        self._held: dict[int, Held] = {}
        self._freed = Counter[str]()
        self._looks_left = most_looks
        self._part: int | None = None  # what is being counted as a whole
        self.parts: list[Part] = []
        self.met: Counter[int] = Counter()
        self.is_partial: bool = False
        self.has_graph: bool = False

    def kind(self, thing: Any) -> int:
        """Return how an object is counted; the same for all objects of its class."""
        kind = type(thing)
        known = self._kinds.get(id(kind))
        if known is None:
            known = self._kinds[id(kind)] = self._kind_of(kind), kind
        return known[0]

    def _kind_of(self, kind: type) -> int:
        bases = bases_of(kind)
        if name_of(kind) in ("ScriptObject", "RecursiveScriptModule"):  # Weights in C++.
            return PACKED
        if self._torch is not None:
            if is_among(self._torch.Tensor, bases):
                return TENSOR
            if is_among(self._torch.nn.Module, bases):
                return MODULE
        if is_among(self._array, bases):
            return ARRAY
        if is_training_class(kind):
            return MODULE
        is_released = "_is_tombstone" in class_contents(kind)
        not_entered = NOT_ENTERED if self._follows_functions else (*NOT_ENTERED, *FUNCTIONS)
        if is_released or any(is_among(base, bases) for base in not_entered):
            return SKIPPED
        packages = {module_of(base).partition(".")[0] for base in bases}
        return OTHER if packages.isdisjoint(NOT_ENTERED_PACKAGES) else SKIPPED

    # Counting

    def count(self, roots: list[Root]) -> None:
        """Count what objects hold, as far as nothing else refers to it.

        A part is entered when all references to it were met on the way. What remains in the end is
        counted part by part. Call it inside `without_overrides`.
        """
        known = {id(root.thing) for root in roots}
        pending: list[_Visit] = []
        for root in roots:
            root.is_training = is_training_class(type(root.thing))
            self._enter(_Visit(root.thing, root.name, root, not root.is_training), pending)
        others: dict[int, _Visit] = {}
        self.met = met = Counter[int]()
        while pending:
            thing, name, root, is_expected = pending.pop()
            # Lists of plain values: tuples would set off garbage collections.
            parts: list[Any] = []
            labels: list[str] = []
            for part, label in parts_of(thing):
                if id(part) in known:  # It is emptied itself.
                    root.is_found |= self.kind(part) in _MEMORY
                elif self.kind(part):
                    parts.append(part)
                    labels.append(label)
            thing = part = None
            shared = []
            for index, count in enumerate(reference_counts(parts)):
                label, is_own = labels[index], is_expected
                if root.is_training:
                    # Only the state of an optimizer is its own, without the parameters in it.
                    is_own = label == ".state" or (is_expected and label != ".keys()")
                visit = _Visit(parts[index], (name + label)[:_LONGEST_NAME], root, is_own)
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
        seen = known.union(key for key, visit in others.items() if visit.is_expected)
        for visit in others.values():
            if visit.is_expected:
                self._count_whole(visit, seen)

    def _enter(self, visit: _Visit, pending: list[_Visit]) -> None:
        """Count a tensor or an array; add another object to those whose parts are examined."""
        kind = self.kind(visit.thing)
        # An object in a container may be a companion, such as a preprocessor with an array.
        visit.root.is_found |= kind in _MEMORY or (kind == ARRAY and visit.root.is_passed)
        self.is_partial = self.is_partial or kind == PACKED
        if kind == TENSOR:
            self._add_tensor(visit.thing, visit.name, visit.is_expected)
        if kind == ARRAY:
            self._add_array(visit.thing, visit.name, visit.is_expected)
        elif kind != TENSOR or not is_plain(self._torch, visit.thing):
            pending.append(visit)
        else:
            # Reading ``__dict__`` would create it. Torch may hide what a tensor refers to.
            inner = get_referents(visit.thing)
            if not inner or dict in map(type, inner):
                pending.append(visit)

    def _count_whole(self, visit: _Visit, seen: set[int]) -> None:
        """Count what an object holds to which something else refers, within ``most_looks``."""
        self._part = len(self.parts)
        try:
            self.parts.append(Part(visit.name, ref(visit.thing)))
        except TypeError:  # A list, a dictionary, an object with slots.
            self.parts.append(Part(visit.name, lambda: None))
        pending: list[_Visit] = []
        self._enter(visit, pending)
        if not visit.root.is_passed:  # What lies behind it does not belong to a companion.
            visit = visit._replace(root=Root(None, ""))
        while pending and self._looks_left > 0:
            for inner, _ in parts_of(pending.pop().thing):
                if self._looks_left <= 0:
                    break
                if id(inner) not in seen and self.kind(inner):
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
        storages = storages_of(self._torch, tensor)
        self.is_partial = self.is_partial or not storages  # Opaque layouts, such as mkldnn's.
        for storage in storages:
            try:
                key, device = storage._cdata, storage.device
                if storage.data_ptr() and device.type != "meta":
                    what = name, storage.nbytes(), name_of_device(device), key, is_expected
                    self._add(*what, self._torch.UntypedStorage, storage)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                # Fake and functional tensors have no real storage.
                log(DEBUG, "%s: its storage cannot be counted: %r", name, error)

    def _add_array(self, array: Any, name: str, is_expected: bool) -> None:
        """Count a numpy array that owns its memory, or the one that an array is a view of."""
        while is_instance(base := self._array.base.__get__(array), self._array):
            array = base
        if base is None:
            nbytes = self._array.nbytes.__get__(array)
            self._add(name, nbytes, "host", id(array), is_expected, _Arrays, array)

    def _add(
        self,
        name: str,
        nbytes: int,
        device: str,
        key: int,
        is_expected: bool,
        kind: Any,
        memory: Any,
    ) -> None:
        known = self._held.get(key)
        if nbytes and (known is None or (is_expected and not known.is_expected)):
            weak = kind._weak_ref(memory)
            self._held[key] = Held(name, nbytes, device, key, is_expected, self._part, kind, weak)

    # Results

    def freed_bytes(self) -> dict[str, int]:
        """Return the bytes that were freed, by device."""
        self.alive()
        return dict(self._freed)

    def alive(self) -> list[Held]:
        """Return what should be freed but still exists, the largest first."""
        for key in list(self._held):  # Pairs would set off garbage collections.
            held = self._held[key]
            if held.is_gone():
                self._freed[held.device] += held.nbytes
                del self._held[key]
        alive = [held for held in self._held.values() if held.is_expected]
        return sorted(alive, key=lambda held: -held.nbytes)

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


def is_training_class(kind: type) -> bool:
    """Return whether objects of a class refer to memory of other owners, such as an optimizer."""
    return any(
        name_of(base) in _TRAINING and module_of(base).startswith(("torch.", "accelerate."))
        for base in bases_of(kind)
    )


_TRAINING = frozenset(
    ("Optimizer", "LRScheduler", "GradScaler", "DataLoader", "AcceleratedScheduler")
)


def is_plain(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor's class is torch's own, which has no slots."""
    kind = type(tensor)
    return kind is torch.nn.Parameter or kind is torch.Tensor


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
    for name in _SPARSE_PARTS:
        with suppress(RuntimeError, AttributeError, NotImplementedError):
            # No layout has all of them.
            found.append(base.untyped_storage(getattr(base, name)(tensor)))
    return found


# What a release empties

OTHERS = "Pass its models or tensors, or give it a close() method"
_ONCE = "It can be read only once: pass list(...) of it, or the model itself"
_ADVICE: list[tuple[tuple[type, ...], str]] = [
    ((type,), "It is a class: pass an instance"),
    ((types.ModuleType,), "It is a module of Python, such as numpy: pass the models in it"),
    (FUNCTIONS, "It is a function: pass what it returns, such as load() instead of load"),
    (SUSPENDABLE, _ONCE),
]
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


def roots_of(objects: Sequence[Any], inventory: Inventory, caller: str = "release()") -> list[Root]:
    """Return the objects to empty, each once; a container stands for what is in it.

    Raises:
        TypeError: An object that was passed by itself can never be released.
    """
    roots: dict[int, Root] = {}
    seen: set[int] = set()
    passed: Iterator[tuple[Any, str]] = ((one, name_of(type(one))) for one in objects)
    levels = [("", passed)]
    while levels:
        prefix, items = levels[-1]
        thing, label = next(items, (None, None))
        if label is None:
            levels.pop()
        if thing is None or id(thing) in seen or is_released(thing):
            continue
        seen.add(id(thing))
        name, is_passed = f"{prefix}{label}"[:_LONGEST_NAME], len(levels) == 1
        is_tensor = inventory.kind(thing) == TENSOR
        inner = None if is_tensor else items_of(thing)
        close = None if is_tensor else _closer_of(thing)
        if inner is not None:
            levels.append((name, inner))
            if close is None and not attributes_of(thing):
                continue
            is_passed = False
        advice = _refusal(thing, inventory, close)
        if not advice:
            name = name if is_tensor else name_of(type(thing))
            roots[id(thing)] = Root(thing, name, is_passed, close)
        elif is_passed:
            raise unsupported(thing, advice, caller)
    return list(roots.values())


def _closer_of(thing: Any) -> Callable[[], Any] | None:
    """Return what closes an object: its method, or a function in its attribute ``close``."""
    close = attributes_of(thing).get("close")
    if callable(close):
        return close  # type: ignore[no-any-return]
    method = find_in_class(type(thing), "close")
    is_method = type(method) in (staticmethod, classmethod) or callable(method)
    return (lambda: thing.close()) if is_method else None


def _refusal(thing: Any, inventory: Inventory, close: Callable[[], Any] | None) -> str:
    """Return why an object can never be released, and what to pass instead; "" if it may be.

    An object with attributes may be: it may load its model later.
    """
    kind, sort = type(thing), inventory.kind(thing)
    if sort == TENSOR:
        is_nested = whole_torch().Tensor.is_nested.__get__(thing)  # type: ignore[union-attr]
        return "It is a nested tensor, which cannot be emptied: use `del`" if is_nested else ""
    bases = bases_of(kind)
    for classes, advice in _ADVICE:
        if any(is_among(base, bases) for base in classes):
            return advice
    if sort == ARRAY:
        return "The last reference to an array keeps its memory: use `del`"
    if any(module_of(base).partition(".")[0] == "faiss" for base in bases):
        return "Call the reset() of the faiss index, and delete the variables that refer to it"
    if any(thing is getattr(sys, name, None) for name in _STREAMS):
        return "The program uses this stream"
    if close is None and find_in_class(kind, "__next__") is not None:
        return _ONCE
    has_attributes = bool(slots_of(kind)) or dictionary_slot(kind) is not None
    is_able = sort == MODULE or close is not None or has_attributes
    return "" if is_able and sort != SKIPPED else OTHERS


def unsupported(thing: Any, advice: str, caller: str = "release()") -> TypeError:
    """Return the error for an object that cannot be released."""
    kind = f"{module_of(type(thing))}.{name_of(type(thing))}"
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    verb = "move" if caller == "offload()" else "release"
    rest = "Nothing was changed"
    if caller not in ("release()", "offload()"):
        rest = "Or pass it to manage() with a function as close="
    return TypeError(f"{caller} cannot {verb} {article} {kind}. {advice}. {rest}.")
