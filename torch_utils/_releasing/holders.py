"""Who still holds memory that a release gave up: named as far as that can be found out.

The search starts where a person would: at the variables of the functions that are running, and
follows references from there, a step at a time, until the time allowed is over. What it finds
that way is reachable, so collecting garbage would not free it; and what it costs does not grow
with the heap, as asking the garbage collector for referrers does.

It only looks. Tensors are asked by torch's C++ accessors, which neither `__torch_function__`
nor a hook sees; what an autograd graph has saved is not read at all, for that would unpack it,
and with checkpoints compute it again.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from types import GetSetDescriptorType
from typing import Any

from torch_utils._releasing import references
from torch_utils._releasing.classes import contents_of_class, name_of, package_of
from torch_utils._releasing.storages import Held, parts_of
from torch_utils._runtime import DEBUG, has_frozen, log

SEARCH_S = 0.01
_BETWEEN_LOOKS = 64  # objects that are passed between two looks at the clock
_PACKAGE = __name__.partition(".")[0]
_GRAPH = "an autograd graph"


class Holders:
    """What was found out about a list of survivors.

    Attributes:
        names: By a storage's key, who holds it.
        graph: Who leads to an autograd graph, or empty: it may hold what nobody else does.
        complete: Whether all that can be reached was passed, within the time allowed.
    """

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}
        self.graph = ""
        self.complete = False

    def of(self, held: Held) -> tuple[str, ...]:
        """Name who holds a survivor; nobody, where that was not found out."""
        found = self.names.get(held.key)
        if found:
            return tuple(dict.fromkeys(found))
        if self.graph:
            return (f"perhaps {_GRAPH} (reached from {self.graph})",)
        if not self.complete:
            return ()
        # What is frozen cannot be listed, so more than "perhaps" would be a guess.
        frozen = ", perhaps one that gc.freeze() has put aside" if has_frozen() else ""
        return ("C++ code, or an object that no variable leads to" + frozen,)

    def explain(self, survivors: list[Held]) -> bool:
        """Say whether each survivor is held by something reachable: no garbage, that is."""
        return all(held.key in self.names for held in survivors)


def find_holders(torch: Any, survivors: list[Held], search_s: float) -> Holders:
    """Name who holds the survivors, within ``search_s`` seconds.

    Never raises, runs no code of the program, and changes nothing of it. Safe from any thread;
    references are read one at a time, so what others change meanwhile may be missed.
    """
    holders = Holders()
    if not survivors or torch is None or search_s <= 0:
        return holders
    try:
        _Search(torch, survivors, holders, time.perf_counter() + search_s).run()
    except Exception as error:
        # This looks into whatever objects the program has; none of them may make a release fail.
        log(DEBUG, "the search for holders ended early: %s", type(error))
    return holders


class _Search:
    """A breadth-first walk from the program's variables."""

    def __init__(self, torch: Any, survivors: list[Held], holders: Holders, stop: float) -> None:
        self._tensors = _Tensors(torch)
        self._module = torch.nn.Module
        self._optimizer = references.contents_of_module("torch.optim").get("Optimizer", ())
        self._array = references.contents_of_module("numpy").get("ndarray", ())
        self._survivors = survivors
        self._keys = {held.key for held in survivors}
        self._holders = holders
        self._stop = stop
        self._seen: set[int] = set()
        self._nodes: list[Any] = []  # Python makes them when asked: an id is theirs while kept.
        self._pending: deque[tuple[Any, str]] = deque()

    def run(self) -> None:
        """Follow the variables of functions first, then those of their modules, then all."""
        frames = references.Frames(_PACKAGE)
        rounds = (frames.variables, frames.globals, references.globals_of_all_modules)
        for roots in rounds:
            self._pending.extend(roots())
            if not self._walk():
                return
            if self._holders.explain(self._survivors):
                return
        self._holders.complete = True

    def _walk(self) -> bool:
        """Pass what is pending and what that leads to; False when the time is over."""
        pending, seen = self._pending, self._seen
        countdown = _BETWEEN_LOOKS
        while pending:
            countdown -= 1
            if not countdown:
                countdown = _BETWEEN_LOOKS
                if time.perf_counter() > self._stop:
                    return False
            thing, holder = pending.popleft()
            kind = type(thing)
            if id(kind) in references.LEAVES or id(thing) in seen:
                continue
            seen.add(id(thing))
            try:
                self._look_into(thing, kind, holder)
            except Exception as error:
                # A half-built object, a graph that another thread frees: not looked into.
                log(DEBUG, "a %s not searched: %s", name_of(kind), type(error))
        return True

    def _look_into(self, thing: Any, kind: type, holder: str) -> None:
        # `issubclass` of the exact type, for `isinstance` asks foreign objects for __class__.
        if issubclass(kind, self._tensors.base):
            self._check_tensor(thing, kind, holder)
        elif issubclass(kind, self._array):
            self._check_array(thing, holder)
        elif (edges := self._tensors.edges_of(thing, kind)) is not None:
            self._nodes.append(thing)
            self._pending.extend((referent, _GRAPH) for referent in gc.get_referents(thing))
            self._pending.extend((node, _GRAPH) for node, _ in edges if node is not None)
            leaf = self._tensors.leaf_of(thing, kind)
            if leaf is not None:
                self._note(leaf, _GRAPH)
        elif package_of(kind) != _PACKAGE:  # Else what this release consists of.
            if issubclass(kind, self._module):
                holder = f"another module ({name_of(kind)})"
            elif issubclass(kind, self._optimizer):
                holder = f"an optimizer ({name_of(kind)})"
            self._pending.extend(references.follow(thing, kind, holder))

    def _check_tensor(self, tensor: Any, kind: type, holder: str) -> None:
        self._note(tensor, holder)
        # Its attributes, and what a subclass wraps.
        self._pending.extend((r, holder) for r in gc.get_referents(tensor) if r is not kind)
        if not self._tensors.answers(kind):
            return
        if tensor.is_leaf:
            if tensor.grad is not None:
                self._note(tensor.grad, f"the gradient of {holder}")
        elif tensor.grad_fn is not None:
            self._holders.graph = self._holders.graph or holder
            self._pending.append((tensor.grad_fn, _GRAPH))

    def _check_array(self, array: Any, holder: str) -> None:
        base = array
        while base is not None and issubclass(type(base), (self._array, memoryview)):
            base = base.obj if type(base) is memoryview else self._array.base.__get__(base)
        if issubclass(type(base), self._tensors.base):
            self._note(base, f"a numpy view ({holder})")

    def _note(self, tensor: Any, holder: str) -> None:
        for key in self._tensors.storages_of(tensor):
            if key in self._keys:
                self._holders.names.setdefault(key, []).append(holder)


class _Tensors:
    """What torch can be asked about tensors and graphs without running the program's code."""

    def __init__(self, torch: Any) -> None:
        self.base = torch.Tensor
        self._plain = (torch.Tensor, torch.nn.Parameter)
        bindings = torch._C
        self._function = getattr(bindings, "_FunctionBase", ())
        self._address = getattr(bindings, "_storage_address", None)
        # A mode of this thread sees what is asked of any tensor; a torch that cannot say
        # whether there is one is asked less.
        depths = [
            getattr(bindings, f"_len_torch_{kind}_stack", lambda: 1)()
            for kind in ("function", "dispatch")
        ]
        self._observed = any(depths)

    def answers(self, kind: type) -> bool:
        """Whether questions to a tensor of this class go to C++ alone."""
        return not self._observed and any(kind is plain for plain in self._plain)

    def storages_of(self, tensor: Any) -> list[int]:
        """List the keys of the storages under a tensor, as far as it can be asked."""
        plain = self.answers(type(tensor))
        if self._address is not None:
            try:
                return [self._address(tensor)]
            except (RuntimeError, NotImplementedError):  # A layout of several parts, or opaque.
                pass
        if not plain:
            return []
        return [part.untyped_storage()._cdata for part in parts_of(tensor)]

    def edges_of(self, thing: Any, kind: type) -> tuple[tuple[Any, int], ...] | None:
        """List the nodes that follow in a graph; None for what is no node of one."""
        getter = self._getter(kind, "next_functions")
        return getter.__get__(thing) if getter is not None else None

    def leaf_of(self, node: Any, kind: type) -> Any | None:
        """Return the leaf whose gradient a node accumulates, if it is such a node."""
        getter = self._getter(kind, "variable")
        return getter.__get__(node) if getter is not None else None

    def _getter(self, kind: type, name: str) -> Any | None:
        """Find an accessor that is C++, in a class that is C++ or torch's own."""
        owner = self._function if issubclass(kind, self._function) else kind
        getter = contents_of_class(owner).get(name)
        return getter if type(getter) is GetSetDescriptorType else None
