"""Who still holds memory that a release gave up: named as far as that can be found out.

The search starts where a person would: at the variables of the functions that are running, and
follows references from there, a step at a time, until the time allowed is over. What it finds
that way is reachable, so collecting garbage would not free it; and what it costs does not grow
with the heap, as asking the garbage collector for referrers does.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch_utils._releasing import references
from torch_utils._releasing.storages import Held, parts_of
from torch_utils._runtime import DEBUG, log

SEARCH_S = 0.01
_BETWEEN_LOOKS = 64  # objects that are passed between two looks at the clock
_PACKAGE = __name__.partition(".")[0]


class Holders:
    """What was found out about a list of survivors.

    Attributes:
        names: By a storage's key, who holds it.
        complete: Whether all that can be reached was passed, within the time allowed.
    """

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}
        self.complete = False

    def of(self, held: Held) -> tuple[str, ...]:
        """Name who holds a survivor; nobody, where that was not found out."""
        found = self.names.get(held.key)
        if found:
            return tuple(dict.fromkeys(found))
        if gc.get_freeze_count():
            return ("an object that gc.freeze() has put aside, perhaps in a cycle",)
        return ("C++ code, or an object that no variable leads to",) if self.complete else ()

    def explain(self, survivors: list[Held]) -> bool:
        """Say whether each survivor is held by something reachable: no garbage, that is."""
        return all(held.key in self.names for held in survivors)


def find_holders(torch: Any, survivors: list[Held], search_s: float) -> Holders:
    """Name who holds the survivors, within ``search_s`` seconds. Never raises."""
    holders = Holders()
    if not survivors or torch is None or search_s <= 0:
        return holders
    try:
        with references.Frames(_PACKAGE) as frames:
            _Search(torch, survivors, holders, time.perf_counter() + search_s).run(frames)
    except Exception as error:
        # This looks into whatever objects the program has; none of them may make a release fail.
        log(DEBUG, "the search for holders ended early: %r", error)
    return holders


class _Search:
    """A breadth-first walk from the program's variables."""

    def __init__(self, torch: Any, survivors: list[Held], holders: Holders, stop: float) -> None:
        self._torch = torch
        self._tensor, self._module = torch.Tensor, torch.nn.Module
        self._optimizer = getattr(sys.modules.get("torch.optim"), "Optimizer", ())
        self._survivors = survivors
        self._keys = {held.key for held in survivors}
        self._holders = holders
        self._stop = stop
        self._seen: set[int] = set()
        self._pending: deque[tuple[Any, str]] = deque()

    def run(self, frames: references.Frames) -> None:
        """Follow the variables of functions first, then those of their modules, then all."""
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
            if kind in references.LEAVES or id(thing) in seen:
                continue
            seen.add(id(thing))
            try:
                self._look_into(thing, kind, holder)
            except Exception as error:
                # A half-built object, a container that another thread changes: not looked into.
                log(DEBUG, "a %s not searched: %r", kind.__name__, error)
        return True

    def _look_into(self, thing: Any, kind: type, holder: str) -> None:
        # `issubclass` of the exact type, for `isinstance` asks foreign objects for __class__.
        if issubclass(kind, self._tensor):
            self._check_tensor(thing, holder)
            return
        if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
            self._check_array(thing, holder)
            return
        if kind.__module__.partition(".")[0] == _PACKAGE:
            return  # A tombstone, or what this release itself consists of.
        if issubclass(kind, self._module):
            holder = f"another module ({kind.__name__})"
        elif self._optimizer and issubclass(kind, self._optimizer):
            holder = f"an optimizer ({kind.__name__})"
        self._pending.extend(references.follow(thing, kind, holder))

    def _check_tensor(self, tensor: Any, holder: str) -> None:
        self._note(tensor, holder)
        contents = getattr(tensor, "__dict__", None)
        if contents:
            self._pending.append((contents, holder))
        if tensor.is_leaf:
            if tensor.grad is not None:
                self._note(tensor.grad, f"the gradient of {holder}")
        elif tensor.grad_fn is not None:
            for saved in _saved_tensors(tensor.grad_fn, self._seen):
                self._note(saved, "an autograd graph")

    def _check_array(self, array: Any, holder: str) -> None:
        base = array
        while type(base).__name__ in ("ndarray", "memoryview"):
            base = base.base if type(base).__name__ == "ndarray" else base.obj
        if base is not None and issubclass(type(base), self._tensor):
            self._note(base, f"a numpy view ({holder})")

    def _note(self, tensor: Any, holder: str) -> None:
        for part in parts_of(tensor):
            key = part.untyped_storage()._cdata
            if key in self._keys:
                self._holders.names.setdefault(key, []).append(holder)


def _saved_tensors(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors that a graph keeps for its backward pass, and the leaves it ends in."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from _tensors_in(node, name)
        nodes.extend(following for following, _ in node.next_functions)


def _tensors_in(node: Any, name: str) -> Iterator[Any]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # Its backward pass has run: nothing is saved any more.
        return
    for tensor in saved if isinstance(saved, (tuple, list)) else (saved,):
        if hasattr(tensor, "untyped_storage"):
            yield tensor
