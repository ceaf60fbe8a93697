"""Find what refers to memory, and name it by the line of the program that a person would change.

The search goes from the memory towards the variables. The garbage collector knows what refers to an
object; each step is one pass over the heap. A reference that it does not know is a variable of a
running function, or belongs to C++. The search changes nothing and runs no code of the program.
"""

from __future__ import annotations

import concurrent
import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from inspect import CO_OPTIMIZED
from itertools import compress, pairwise
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar

from torch_utils._oom import clear_frame
from torch_utils._release.graph import labels_in
from torch_utils._release.objects import (
    attributes_of,
    is_instance,
    is_namespace,
    name_of,
    without_overrides,
)
from torch_utils._release.storages import Held, group_by_part, storages_of
from torch_utils._report import is_variable
from torch_utils._runtime import (
    DEBUG,
    has_gil,
    is_before_2_10,
    log,
    private,
    reference_counts,
    whole_torch,
)

OUTSIDE_PYTHON = "something that Python does not show, such as a numpy array or C++"
_WITH_LOCALS = frozenset(("locals", "vars", "eval", "exec", "dir"))
_NOISE = (
    *(f" at {threading.__file__}", f" at {concurrent.__path__[0]}", " of module threading"),
    *("/_pytest/", "/pluggy/"),
)
_PACKAGE = __name__.partition(".")[0]
_MOST_STEPS = 10  # from the memory to a variable
_MOST_THINGS = 32  # whose referrers one pass finds; it takes longer the more there are
_MOST_REFERRERS = 500
_MOST_NAMES = 5  # for each piece of memory
_MOST_ROUNDS = 10  # of clearing frames
_MOST_GROUPS = 64  # the largest, for which frames are cleared
_AT_ONCE = 16  # pieces of memory whose holders one search finds

P = TypeVar("P")

_SUSPENDABLE = (
    (GeneratorType, "gi", "generator"),
    (CoroutineType, "cr", "coroutine"),
    (AsyncGeneratorType, "ag", "asynchronous generator"),
)
_ENDS = ("the variable ", "the class ", "the context variable ")

Targets = list[list[Any]]
"""For each piece of memory, the objects that hold it."""


class Node:
    """An object on the way from a variable to memory.

    Attributes:
        thing: The object.
        below: The nodes to which it refers.
        own: The numbers of the memory that it holds itself.
        targets: The numbers of the memory to which it leads.
        name: What it is called, if the way ends here: a variable, a function, a class.
        is_known: Whether all references to it were found.
        has_graph: Whether it leads to them by an autograd graph or as a view, in C++.
    """

    __slots__ = ("below", "has_graph", "is_known", "name", "own", "targets", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.below: list[Node] = []
        self.own: set[int] = set()
        self.targets: set[int] = set()
        self.name = ""
        self.is_known = True
        self.has_graph = False


class Search:
    """Everything that leads to some memory, as far as a few steps find it.

    Attributes:
        nodes: The objects on the way, by their ids.
    """

    def __init__(self, targets: Targets, *, ends_at_frames: bool = False) -> None:
        self.nodes: dict[int, Node] = {}
        self._ends_at_frames = ends_at_frames
        level: list[Node] = []
        for number, things in enumerate(targets):
            for thing in things:
                node = self.nodes.get(id(thing))
                if node is None:
                    node = self.nodes[id(thing)] = Node(thing)
                    level.append(node)
                node.own.add(number)
            things.clear()
        thing = None
        level = [*self._through_graphs(), *level]
        for _ in range(_MOST_STEPS):
            level = self._climb(level[:_MOST_THINGS])
            self._pass_on_targets()
            if ends_at_frames and len(self.held_targets()) == len(targets):
                break  # No frame is to be cleared.

    def _pass_on_targets(self) -> None:
        is_new = True
        while is_new:
            is_new = False
            for node in self.nodes.values():
                leads_to = node.own.union(*(one.targets for one in node.below))
                is_new = is_new or len(leads_to) > len(node.targets)
                node.targets = leads_to

    def _climb(self, level: list[Node]) -> list[Node]:
        """Find what refers to the nodes of a level; return the nodes from which to go on."""
        things = [node.thing for node in level if not node.name]
        if not things:
            return []
        here = {id(thing) for thing in things}
        visible = Counter[int]()
        found: list[Node] = []
        referrers = gc.get_referrers(*things)
        for referrer in referrers[:_MOST_REFERRERS]:
            kind = type(referrer)
            if kind is Node or referrer is things:
                continue
            met = Counter(key for key in map(id, gc.get_referents(referrer)) if key in here)
            visible.update(met)
            node = self.nodes.get(id(referrer))
            if node is None:
                node = self.nodes[id(referrer)] = Node(referrer)
                child = self.nodes[next(iter(met))].thing if met else None
                node.name = _name_of(referrer, child)  # That of a variable depends on the way.
                if self._ends_at_frames and not node.name.startswith(_ENDS):
                    # Only an ended call may refer to a function, for example.
                    node.name = "a call that has ended" if kind is FrameType else ""
                child = None
                found.append(node)
            node.below += [self.nodes[key] for key in met if self.nodes[key] is not node]
        is_cut = len(referrers) > _MOST_REFERRERS
        referrer = None
        referrers.clear()
        torch: Any = whole_torch()
        for thing, count in zip(things, reference_counts(things), strict=True):
            known = visible[id(thing)] + 1  # The node refers to it, too.
            if torch is not None and is_instance(thing, torch.Tensor):
                uses = private(torch, "Tensor._use_count")
                known += uses is not None and uses(thing) > 1  # Torch refers to it for C++.
            self.nodes[id(thing)].is_known = is_cut or count <= known
        thing = None
        return found

    def _through_graphs(self) -> list[Node]:
        """Return tensors that lead to the memory in C++: by a graph, as views, or as owners."""
        torch: Any = whole_torch()
        if torch is None:
            return []
        base = torch.Tensor
        # By the address of their storage, or by the operation of a graph that has made them.
        wanted: dict[Any, Node] = {}
        for node in self.nodes.values():
            if is_instance(node.thing, base):
                wanted.update(dict.fromkeys(addresses_of(torch, node.thing), node))
                wanted.setdefault(base.grad_fn.__get__(node.thing), node)
        wanted.pop(None, None)
        found: list[Node] = []
        known: dict[Any, set[Any]] = {}
        for tensor in live_objects([base]) if wanted else ():
            keys = addresses_of(torch, tensor) & wanted.keys()
            keys |= _reached_by_graph(torch, base.grad_fn.__get__(tensor), known, wanted)
            leads_to = self.nodes.get(id(tensor))
            if leads_to is None and keys:
                leads_to = self.nodes[id(tensor)] = Node(tensor)
                found.append(leads_to)
            if leads_to is not None:
                below = {id(wanted[key]): wanted[key] for key in keys}
                below.pop(id(leads_to), None)
                leads_to.has_graph = bool(below)
                leads_to.below += below.values()
        tensor = None
        return found

    # What was found

    def ended_frames(self) -> list[FrameType]:
        """Return the frames of calls that have ended, if nothing else leads to the same memory."""
        held = self.held_targets()
        frames = [node for node in self.nodes.values() if type(node.thing) is FrameType]
        return [node.thing for node in frames if node.targets - held]

    def held_targets(self) -> set[int]:
        """Return the numbers of the memory that is in use, as far as that can be told."""
        held: set[int] = set()
        for node in self.nodes.values():
            if (node.name or not node.is_known) and type(node.thing) is not FrameType:
                held |= node.targets
        return held

    def names(self) -> dict[int, list[str]]:
        """Return what holds each piece of memory, by its number; variables first."""
        found: dict[int, list[str]] = {}
        unknown = {key: key for key, node in self.nodes.items() if not node.is_known}
        for key in list(unknown):  # A variable that inner functions use, too, is in a cell.
            thing = self.nodes[key].thing
            if type(thing) is CellType:
                with suppress(ValueError):  # It is empty.
                    unknown[key] = id(thing.cell_contents)
        thing = None
        variables = _variables_of_functions(set(unknown.values()))
        for key, node in self.nodes.items():
            ends = [node.name] if node.name else variables.get(unknown.get(key, 0), [])
            if key in unknown and not ends and not node.below:
                ends = [OUTSIDE_PYTHON]
            for number in node.targets if ends else ():
                found.setdefault(number, []).extend(_describe(e, node, number) for e in ends)
        for node in self.nodes.values():
            for number in node.targets - found.keys():
                if not node.below or type(node.thing) is FrameType:
                    continue
                found[number] = [_describe(_class_phrase(node.thing), node, number)]
        self.clear()
        return {number: _choose(names) for number, names in found.items()}

    def clear(self) -> None:
        """Drop the nodes, which refer to each other."""
        for node in self.nodes.values():
            node.below, node.thing = [], None
        self.nodes.clear()


def _choose(names: list[str]) -> list[str]:
    """Return a few names, variables first, and those of the standard library only if need be."""
    # Of several items of one list, the first is enough.
    names = [*{re.sub(r"\[\d+\]", "[]", name): name for name in names[::-1]}.values()][::-1]
    names.sort(key=lambda name: not is_variable(name))
    own = [one for one in names if not any(map(one.__contains__, _NOISE))]
    return (own or names)[:_MOST_NAMES]


def _name_of(thing: Any, child: Any) -> str:
    """Return how an object at which a way ends is named; "" if the way goes on."""
    kind = type(thing)
    if kind is dict:
        module = dict.get(thing, "__name__")
        known = sys.modules.get(module) if type(module) is str else None
        if is_namespace(thing) or (type(known) is ModuleType and vars(known) is thing):
            return _variable_of(thing, child)
    if is_instance(thing, type):
        return f"the class {type.__dict__['__qualname__'].__get__(thing)}"
    if kind is FunctionType:
        return f"the function {thing.__qualname__}() {_place_of(thing.__code__)}"
    for suspendable, prefix, what in _SUSPENDABLE:
        if kind is suspendable:
            frame, code = getattr(thing, f"{prefix}_frame"), getattr(thing, f"{prefix}_code")
            return f"the {what} {thing.__qualname__}() {_place_of(code, frame)}"
    name = name_of(kind)
    if name == "_lru_cache_wrapper":
        function = attributes_of(thing).get("__wrapped__")
        if type(function) is FunctionType:
            return f"the lru_cache of {function.__qualname__}() {_place_of(function.__code__)}"
    if name in ("hamt_bitmap_node", "hamt_array_node"):
        inner = gc.get_referents(thing)
        for value, key in pairwise(inner):
            if value is child and type(key) is ContextVar:
                return f"the context variable {key.name!r}"
    return ""


def _variable_of(namespace: dict[str, Any], value: Any) -> str:
    named = [key for key, one in list(namespace.items()) if one is value]
    module = dict.get(namespace, "__name__")
    place = f"module {module}" if type(module) is str else "a namespace"
    return f"the variable {named[0]!r} of {place}" if named else ""


def _class_phrase(thing: Any) -> str:
    """Return what kind of object something is, such as "an optimizer (SGD)"."""
    torch: Any = whole_torch()
    name = name_of(type(thing))
    if type(thing) is MethodType and type(thing.__func__) is FunctionType:
        return f"the method {thing.__func__.__qualname__}()"
    if torch is not None and is_instance(thing, torch.nn.Module):
        return f"another module ({name})"
    if torch is not None and is_instance(thing, torch.optim.Optimizer):
        return f"an optimizer ({name})"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _place_of(code: CodeType, frame: FrameType | None = None) -> str:
    line = code.co_firstlineno if frame is None else frame.f_lineno
    return f"at {code.co_filename}:{line}"


def _describe(end: str, node: Node, number: int) -> str:
    """Return the name of a holder, and the way from there to the memory."""
    way = _way(node, number)
    things = [one.thing for one in way]
    starts_in_namespace = type(things[0]) is dict and is_variable(end) and bool(node.name)
    if starts_in_namespace and len(things) > 1:
        end = _variable_of(things[0], things[1]) or end
    text = end
    frame = next((thing for thing in things if type(thing) is FrameType), None)
    if frame is not None:
        code = frame.f_code
        return f"{end}, an exception that ended {code.co_qualname}() {_place_of(code, frame)}"
    owner = next(filter(_is_of_torch, things[-2::-1]), None)
    last = len(things)
    torch: Any = whole_torch()
    if owner is not None and not is_instance(owner, torch.nn.Module):
        last = 1 + [thing is owner for thing in things].index(True)  # Its groups tell nothing.
    path = _path_of(things[:last], end, starts_in_namespace)
    if path:
        text += f": {path}"
    if owner is not None:
        text += f", {_class_phrase(owner)}"
    is_in_cpp = any(one.has_graph for one in way[:-1])
    return f"the autograd graph or a view of {text}" if is_in_cpp else text


def _way(start: Node, number: int) -> list[Node]:
    """Return the shortest way from a node to what holds a piece of memory."""
    came_from: dict[int, Node | None] = {id(start): None}
    pending = [start]
    for node in pending:  # It grows meanwhile.
        if number in node.own:
            break
        for one in node.below:
            if number in one.targets and id(one) not in came_from:
                came_from[id(one)] = node
                pending.append(one)
    way: list[Node] = []
    step: Node | None = node
    while step is not None:
        way.append(step)
        step = came_from[id(step)]
    return way[::-1]


def _is_of_torch(thing: Any) -> bool:
    torch: Any = whole_torch()
    kinds = () if torch is None else (torch.nn.Module, torch.optim.Optimizer)
    return any(is_instance(thing, kind) for kind in kinds)


def _path_of(things: list[Any], end: str, starts_in_namespace: bool) -> str:
    """Return the expression of a program for a way, such as ``app.state.encoder``."""
    first = things[0]
    if type(first) is FunctionType and len(things) > 2:
        cells = dict(zip(map(id, first.__closure__ or ()), first.__code__.co_freevars, strict=True))
        name = cells.get(id(things[2]))
        return f"its variable {name!r}" if name else "a default value"
    path, parent = "", None
    for owner, part in pairwise(things):
        label = labels_in(owner, parent).get(id(part), "")
        if is_instance(parent, type) and label[:2] == "['":
            label = f".{label[2:-2]}"
        parent = owner
        if owner is not first or not starts_in_namespace:  # The variable is in its name already.
            path += label
    if is_variable(end):
        variable = end.partition("'")[2].partition("'")[0]
        return f"{variable}{path}" if path else ""
    return path.lstrip(".")


def _variables_of_functions(wanted: set[int]) -> dict[int, list[str]]:
    """Return the variables of running functions that refer to objects, by the ids of these."""
    found: dict[int, list[str]] = {}
    frames: list[FrameType | None] = []
    if wanted:  # Without the GIL, the other threads change theirs meanwhile.
        frames = list(sys._current_frames().values()) if has_gil() else [sys._getframe()]
    while frames:
        # One of them is this function's own. A variable that still refers to it at the end would
        # make a cycle, which keeps the variables of all its callers.
        frame = frames.pop()
        while frame is not None:
            package = (frame.f_globals.get("__name__") or "").partition(".")[0]
            if package != _PACKAGE and frame.f_code.co_flags & CO_OPTIMIZED:
                for name, key in _locals_of(frame):
                    if key in wanted:
                        place = _place_of(frame.f_code, frame)
                        text = f"the variable {name!r} of {frame.f_code.co_qualname}() {place}"
                        found.setdefault(key, []).append(text)
            frame = frame.f_back
    return found


def _locals_of(frame: FrameType) -> list[tuple[str, int]]:
    """Return the names of a running function's variables, and the ids of their values."""
    # A debugger would write them back, and the program may have this dictionary. pytest only asks
    # for it if an assertion fails.
    names = frame.f_code.co_names
    may_have = not _WITH_LOCALS.isdisjoint(names) and "@py_builtins" not in names
    if sys.version_info < (3, 13) and (frame.f_trace is not None or may_have):
        return []
    contents = frame.f_locals
    found = [(name, id(value)) for name, value in list(contents.items())]
    # Before Python 3.13 this is a dictionary of the frame, which would keep them alive.
    if sys.version_info < (3, 13) and sys.getrefcount(contents) <= _OF_FRAME:
        contents.clear()
    return found


def _probe() -> int:
    contents = sys._getframe().f_locals
    return sys.getrefcount(contents)


_OF_FRAME = _probe()


# Memory and the objects that hold it


def live_objects(kinds: Sequence[type]) -> Iterator[Any]:
    """Yield all objects of classes and their subclasses, without running code of these."""
    wanted = {id(kind): kind for kind in kinds}
    pending = [*kinds]
    while pending:
        below: list[type] = type.__subclasses__(pending.pop())
        pending += [one for one in below if id(one) not in wanted]
        wanted.update((id(one), one) for one in below)
    # Objects refer to their class. To ask for them is faster if there are few classes. Before torch
    # 2.10, a tensor that C++ uses as well does not tell what it refers to.
    torch: Any = whole_torch()
    tells = torch is None or id(torch.Tensor) not in wanted or not is_before_2_10(torch)
    few = tells and len(wanted) < 50
    things = gc.get_referrers(*wanted.values()) if few else gc.get_objects()
    yield from compress(things, map(wanted.__contains__, map(id, map(type, things))))


def addresses_of(torch: Any, tensor: Any) -> set[int]:
    """Return the addresses of a tensor's storages. Makes no Python object for them."""
    address = private(torch, "_C._storage_address")
    with suppress(RuntimeError, NotImplementedError):  # Sparse and opaque tensors.
        if address is not None and torch.Tensor.layout.__get__(tensor) == torch.strided:
            return {address(tensor)}
    return {storage._cdata for storage in storages_of(torch, tensor)}


def walk_graph(torch: Any, start: Any, seen: set[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of an autograd graph that were not seen yet.

    Only the structure is read: saved tensors would run hooks of the program.

    Args:
        torch: The module.
        start: A node, or None.
        seen: Takes the nodes.
        ends: Nodes whose inputs are not followed.
    """
    base: Any = private(torch, "_C._FunctionBase")
    pending = [start]
    while pending:
        one = pending.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        yield one
        if one not in ends:
            # A function of the program may have an attribute of this name.
            is_own = base is not None and is_instance(one, base)
            following = base.next_functions.__get__(one) if is_own else one.next_functions
            pending += [each for each, _ in following]


def _reached_by_graph(
    torch: Any, start: Any, known: dict[Any, set[Any]], wanted: Mapping[Any, Any]
) -> set[Any]:
    """Return which operations, and which weights by their addresses, an operation leads to.

    Args:
        torch: The module.
        start: The operation, a node of an autograd graph, or None.
        known: The results for other nodes.
        wanted: What is looked for.
    """
    found: set[Any] = set()
    for one in walk_graph(torch, start, set(), known):
        if one in wanted:
            found.add(one)
        if name_of(type(one)) == "AccumulateGrad":
            found |= addresses_of(torch, one.variable) & wanted.keys()
        found |= known.get(one, set())
    if start is not None:
        known[start] = found
    return found


@contextmanager
def reading() -> Iterator[None]:
    """Read objects of the program, of which none may make a release fail."""
    try:
        with without_overrides(whole_torch()):
            yield
    except Exception as error:
        log(DEBUG, "the search for what holds memory ended early: %r", error)


class Holders:
    """Finds the holders of pieces of memory when they are asked for, some at once.

    Args:
        pieces: What each piece consists of.
        objects_of: Returns the objects that hold each of some pieces, as long as they exist.
    """

    def __init__(self, pieces: Sequence[P], objects_of: Callable[[Sequence[P]], Targets]) -> None:
        self._pieces, self._objects_of = pieces, objects_of
        self._found: dict[int, tuple[str, ...]] = {}

    def of(self, number: int) -> tuple[str, ...]:
        """Return what holds a piece of memory, variables first. Never raises."""
        if number not in self._found:
            first = number - number % _AT_ONCE
            pieces = self._pieces[first : first + _AT_ONCE]
            self._found.update((first + n, ()) for n in range(len(pieces)))
            with reading():
                names = Search(self._objects_of(pieces)).names()
                self._found.update((first + n, tuple(found)) for n, found in names.items())
        return self._found[number]


def called(finders: Sequence[Callable[[], Any]]) -> Targets:
    """Return for each finder the object that it finds, if that still exists."""
    return [[one] if (one := find()) is not None else [] for find in finders]


def clear_ended_frames(alive: list[Held]) -> int:
    """Clear the frames of calls that have ended, if only they lead to memory that is still alive.

    They are those of tracebacks, such as of a stored exception. Never raises.

    Returns:
        The bytes of which it cannot be told that something uses them.
    """
    unexplained = 0
    with reading():
        for _ in range(_MOST_ROUNDS):
            groups = group_by_part([one for one in alive if not one.is_gone()])[:_MOST_GROUPS]
            search = Search(objects_of(groups), ends_at_frames=True)
            held, frames = search.held_targets(), search.ended_frames()
            search.clear()
            unexplained = sum(
                one.nbytes
                for number, group in enumerate(groups)
                for one in group
                if number not in held and not one.is_gone()
            )
            # Inner calls may have kept parts of what went with the frames of the outer ones.
            if not sum(map(clear_frame, frames)):
                break
    return unexplained


def objects_of(groups: Sequence[list[Held]]) -> Targets:
    """Return the objects that hold groups of memory; the heap is searched once for all."""
    targets: Targets = [[] for _ in groups]
    missing: dict[int, int] = {}
    for number, group in enumerate(groups):
        part = None if group[0].part is None else group[0].part.get()
        if part is not None:
            targets[number].append(part)
        else:
            missing.update((held.key, number) for held in group)
    part = None
    torch: Any = whole_torch()
    for tensor in live_objects([torch.Tensor]) if missing and torch is not None else ():
        for key in addresses_of(torch, tensor) & missing.keys():
            targets[missing[key]].append(tensor)
    return targets
