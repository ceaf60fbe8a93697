"""What a release gives up: which objects go, and which stay because something else uses them.

This is the algorithm of Python's own garbage collector on the objects to which the released ones
lead. Each reference among them is counted. An object with more references than that is used from
outside, and stays, with everything to which it leads. The others go.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import gt
from typing import Any
from weakref import getweakrefcount

from torch_utils._release.objects import (
    ARRAY,
    CONTAINERS,
    LONGEST_NAME,
    MEMORY,
    MODULE,
    PACKED,
    REGISTRIES,
    SKIPPED,
    TENSOR,
    TRAINING,
    Kinds,
    attributes_of,
    bases_of,
    find_in_class,
    is_container,
    is_namespace,
    items_of,
    layout_of,
    leads_nowhere,
)
from torch_utils._release.roots import BULK, MOST_OBJECTS, Root
from torch_utils._runtime import reference_counts


class Graph:
    """The objects to which others lead, each once. Not thread-safe.

    It refers to all of them, so it must end before they can.

    Args:
        roots: The objects to begin with.
        kinds: How objects are counted.

    Attributes:
        nodes: The objects, the roots first. An object stands behind one that refers to it.
        inner: How many references to each object were met.
        memory: The numbers of tensors and arrays.
        unexpected: The numbers of objects that are not given up: the parameters of an optimizer.
        stays: What `users` returned when the graph was made.
        is_partial: Whether there is memory that is not counted: packed weights, or what lies behind
            more than `MOST_OBJECTS`.
    """

    def __init__(self, roots: Sequence[Root], kinds: Kinds) -> None:
        self.nodes: list[Any] = []
        self.inner: list[int] = []
        self.memory: list[int] = []
        self.unexpected: set[int] = set()
        self.is_partial: bool = False
        self.count_of_roots: int = len(roots)
        self._kinds = kinds
        self._index: dict[int, int] = {}  # Numbers by ids; -1 for what is not followed.
        self._parents: list[int] = []
        # An optimizer refers to parameters of others, which another root may give up.
        ordered = sorted(roots, key=lambda root: root.kind == TRAINING)
        self._names = {number: root.name for number, root in enumerate(ordered)}
        self._labels: dict[int, dict[int, str]] = {}
        # Modules, and what is in them, with the number of steps from the module.
        self._of_models: dict[int, int] = {}
        self._models: list[int] = []  # Those whose parts are to be added next.
        for number, root in enumerate(ordered):
            self._add(root.thing, -1, root.kind)
            if root.kind == TRAINING:
                self.unexpected.add(number)
        self._branching: set[int] = set()  # The ids of classes whose objects lead on.
        self._cut: set[int] = set()  # Those of objects that were left out.
        self._models.clear()
        for number, root in enumerate(ordered):
            self._walk(number, root)
        # Left out were, for example, half of 100,000 documents: the others lead to nothing.
        self.is_partial |= not self._cut.isdisjoint(self._branching)
        self.stays: dict[int, int] = self.users()

    def _add(self, thing: Any, parent: int, kind: int) -> int:
        number = self._index[id(thing)] = len(self.nodes)
        self.nodes.append(thing)
        self._parents.append(parent)
        self.inner.append(0)
        if parent in self.unexpected or (kind == TRAINING and parent >= 0):
            self.unexpected.add(number)
        if kind in (TENSOR, ARRAY):
            self.memory.append(number)
        elif kind == MODULE:
            self._of_models[number] = 0
            self._models.append(number)
        elif kind == PACKED:
            self.is_partial = True
        return number

    def _walk(self, number: int, root: Root) -> None:
        """Add what a root leads to: modules and what is in them first, large containers last."""
        state = None
        self._is_training = root.kind == TRAINING
        if root.kind == TRAINING:  # Its state is its own, but not the parameters in it.
            attributes = attributes_of(root.thing)
            state = attributes.pop("state", None)
            pending = self._add_parts(number, list(filter(gc.is_tracked, attributes.values())))
            attributes.clear()
        else:
            pending = [number]
        bulky: list[int] = []
        models = self._models
        while models or pending or bulky or state is not None:
            if state is not None and not (models or pending or bulky):
                self.unexpected.remove(number)
                pending, state = self._add_parts(number, [state]), None
                self.unexpected.add(number)
                continue
            one = (models or pending or bulky).pop()
            parts = self._kinds.referents(self.nodes[one])
            if len(parts) > BULK and (models or pending):
                bulky.append(one)
            elif one in self._of_models:
                new = self._add_parts(one, parts)
                self._of_models.update(dict.fromkeys(new, self._of_models[one] + 1))
                models += new
            else:
                pending += self._add_parts(one, parts)
            parts.clear()

    def _add_parts(self, one: int, parts: list[Any]) -> list[int]:
        """Count references of an object; return the numbers of parts that are new."""
        index, inner, of = self._index, self.inner, self._kinds.of
        new: list[int] = []
        is_expected, leads_on = one not in self.unexpected and not self._is_training, False
        is_registry = self._of_models.get(one, 2) < 2  # A module, or its dictionary.
        for part in parts:
            number = index.get(id(part))
            if number is None:
                kind = of(type(part))
                has_items = id(type(part)) in CONTAINERS
                if kind == SKIPPED or (has_items and leads_nowhere(part)):
                    number = index[id(part)] = -1
                elif len(index) >= MOST_OBJECTS and kind not in MEMORY and not is_registry:
                    self._cut.update(map(id, map(type, parts)))
                    break
                else:
                    number = self._add(part, one, kind)
                    if kind != MODULE:
                        new.append(number)
            elif is_expected:
                self.unexpected.discard(number)  # An optimizer refers to it, too.
            if number >= 0:
                inner[number] += 1
                leads_on = True
        if leads_on:
            self._branching.add(id(type(self.nodes[one])))
        return new

    def name_of(self, number: int) -> str:
        """Return the path from a root to an object, such as "Sequential.0.weight"."""
        names, path = self._names, []
        while number not in names:
            path.append(number)
            number = self._parents[number]
        while path:
            number = path.pop()
            parent = self._parents[number]
            label = self._labels_in(parent).get(id(self.nodes[number]), "")
            names[number] = (names[parent] + label)[:LONGEST_NAME]
        return names[number]

    def has_attributes(self, number: int) -> bool:
        """Return whether an object is the ``__dict__`` of the one that refers to it."""
        parent = self.nodes[self._parents[number]]
        descriptor = None if is_container(type(parent)) else layout_of(type(parent))[0]
        return descriptor is not None and descriptor.__get__(parent) is self.nodes[number]

    def _labels_in(self, number: int) -> dict[int, str]:
        known = self._labels.get(number)
        if known is None:
            parent = self._parents[number]
            owner = None if parent < 0 else self.nodes[parent]
            known = self._labels[number] = labels_in(self.nodes[number], owner)
        return known

    # What goes and what stays

    def users(self, explained: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return the objects that stay, each with the one that is used from outside.

        Args:
            explained: References to objects by number that are known besides.

        Returns:
            Numbers by numbers, in the order in which they were found.
        """
        inner = self.inner
        if explained:
            inner = inner.copy()
            for number, count in explained.items():
                inner[number] += count
        used = list(map(gt, reference_counts(self.nodes), inner))
        used[: self.count_of_roots] = [False] * self.count_of_roots
        stays: dict[int, int] = {}
        first = used.index(True) if True in used else len(used)
        for number in range(first, len(used)):
            if used[number]:
                self._follow(number, stays)
        return stays

    def shares_dictionary(self, root: Any) -> bool:
        """Return whether something else uses the ``__dict__`` of a root."""
        descriptor = layout_of(type(root))[0]
        contents = {} if descriptor is None else descriptor.__get__(root)
        return self._index.get(id(contents)) in self.stays or is_namespace(contents)

    def _follow(self, user: int, stays: dict[int, int]) -> None:
        pending = [self.nodes[user]]
        stays.setdefault(user, user)
        seen: set[int] = set()
        while pending:
            for part in self._kinds.referents(pending.pop()):
                number = self._index.get(id(part))
                if number is None:
                    # A dictionary that came into being when the attributes were read.
                    if type(part) is dict and id(part) not in seen and not is_namespace(part):
                        seen.add(id(part))
                        pending.append(part)
                elif number >= self.count_of_roots and number not in stays:
                    stays[number] = user
                    pending.append(part)

    def drop(self) -> list[Any]:
        """Drop all objects to which nothing else refers any longer, in order.

        Their destructors run on whole objects, as always.

        Returns:
            The rest, without what stays: reference cycles, and what they lead to.
        """
        nodes, step, stalled = self.nodes, 1, 0
        staying = {id(nodes[number]) for number in self.stays}
        nodes[:] = [one for one in nodes[self.count_of_roots :] if id(one) not in staying]
        while stalled < 2:  # Once in each direction.
            before = len(nodes)
            for number in range(before)[::step]:
                if sys.getrefcount(nodes[number]) == _OF_A_LIST:
                    nodes[number] = None
            nodes[:] = [one for one in nodes if one is not None]
            stalled, step = stalled + 1 if len(nodes) == before else 0, -step
        return nodes


_PROBE = [object()]
_OF_A_LIST = sys.getrefcount(_PROBE[0])


def labels_in(owner: Any, parent: Any = None) -> dict[int, str]:
    """Return how what stands in an object is named, by ids.

    Args:
        owner: The object.
        parent: What refers to it. A dictionary may have the attributes of its parent, or the
            parameters of a module.
    """
    attributes: Any = parent if type(parent) is dict else {}
    if not is_container(type(owner)):
        attributes = owner = attributes_of(owner)
    elif parent is not None and not is_container(type(parent)):
        dictionary = layout_of(type(parent))[0]
        attributes = {} if dictionary is None else dictionary.__get__(parent)
    found: dict[int, str] = {}
    if attributes is owner:
        for name, part in list(attributes.items()):
            if type(name) is str:
                found.setdefault(id(part), "" if name in REGISTRIES else f".{name}")
    elif any(attributes.get(name) is owner for name in REGISTRIES):
        for name, part in list(dict.items(owner)):
            found.setdefault(id(part), f".{name}" if type(name) is str else "")
    else:
        for part, label in items_of(owner):
            found.setdefault(id(part), label)
    return found


def break_cycles(things: list[Any]) -> int:
    """Empty the objects to which only each other refer, so that they go.

    What a destructor or a weak reference leads to is left to Python's garbage collector, because
    both may use all of it.

    Args:
        things: The objects; the list must be the only other reference to them, and is cleared.

    Returns:
        How many objects went.
    """
    # Reading the attributes of an object for its name may have made a dictionary of them.
    known = set(map(id, things))
    for parts in map(gc.get_referents, things.copy()):
        things += [one for one in parts if type(one) is dict and id(one) not in known]
        known.update(map(id, parts))
    parts, count = [], len(things)
    # In one step of the interpreter, so that no other thread changes them meanwhile.
    found: list[Any] = list(chain(map(sys.getrefcount, things), map(gc.get_referents, things)))
    index = {id(one): number for number, one in enumerate(things)}
    inner: Counter[int] = Counter()
    edges = [
        [index[key] for key in map(id, found[count + n]) if key in index] for n in range(count)
    ]
    for parts in edges:
        inner.update(parts)
    how: dict[int, _Clearing] = {}
    stays: set[int] = set()
    pending = []
    for number, one in enumerate(things):
        if id(type(one)) not in how:
            how[id(type(one))] = _Clearing(type(one))
        is_used = found[number] - _OF_A_MAP > inner[number]
        if is_used or how[id(type(one))].has_destructor or getweakrefcount(one):
            pending.append(number)
    one = None
    found.clear()
    while pending:
        number = pending.pop()
        if number not in stays:
            stays.add(number)
            pending.extend(edges[number])
    for number in range(count):
        if number not in stays:
            how[id(type(things[number]))].clear(things[number])
    things.clear()
    return count - len(stays)


_OF_A_MAP = next(map(sys.getrefcount, _PROBE))


class _Clearing:
    """How objects of a class are emptied, as far as Python allows it."""

    def __init__(self, kind: type) -> None:
        bases = set(map(id, bases_of(kind)))
        containers = (OrderedDict, dict, list, set, deque)
        self._container = next((one for one in containers if id(one) in bases), None)
        self._dictionary, self._slots = layout_of(kind)
        self.has_destructor = find_in_class(kind, "__del__") is not None

    def clear(self, thing: Any) -> None:
        """Drop what an object refers to."""
        if self._container is not None:
            self._container.clear(thing)
        elif type(thing) is types.CellType:
            with suppress(ValueError):  # It is empty.
                del thing.cell_contents
        if self._dictionary is not None:
            self._dictionary.__get__(thing).clear()
        for slot in self._slots:
            with suppress(AttributeError, TypeError):  # It is empty, or a field of a C class.
                slot.__delete__(thing)
