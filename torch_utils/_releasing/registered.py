"""Note thousands of tensors and their gradients, those of modules too, in steps of C.

One call in Python for each would cost more than all that is done with it. What does not fit (a
class of the program's, another device, memory that is lent, a tensor with attributes) is left to
the caller, who looks at it alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from gc import get_referents
from itertools import accumulate, chain, compress, repeat
from operator import is_not, not_
from typing import Any

from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.trees import AT_ONCE, Paths, ids_of_types


class Names:
    """The names of tensors that some modules have registered, made for those that are asked.

    Keeps no module alive.
    """

    def __init__(self, root: str, paths: Paths, modules: Sequence[Any]) -> None:
        self._root = root
        self._paths = paths
        self._modules = list(map(id, modules))
        self._ends: list[int] = []
        self._names: list[Any] = []

    def fill(self, registries: Sequence[dict[str, Any]]) -> list[Any]:
        """Take the names of what these dictionaries hold, one for each module; returns that.

        Raises:
            RuntimeError: Another thread has changed one of them meanwhile.
        """
        self._ends = list(accumulate(map(len, registries)))
        self._names = list(chain.from_iterable(registries))
        tensors = list(chain.from_iterable(map(dict.values, registries)))
        if not self._ends[-1] == len(self._names) == len(tensors):
            raise RuntimeError("a dictionary changed while it was read")
        return tensors

    def of(self, position: int) -> tuple[str, str]:
        """Name the module and the tensor."""
        path = self._paths[self._modules[bisect_right(self._ends, position)]]
        name = self._names[position]
        return f"{self._root}.{path}" if path else self._root, name if type(name) is str else "?"

    def __call__(self, position: int) -> str:
        return ".".join(filter(None, self.of(position)))


class NamesOfGradients:
    """The same, for their gradients."""

    def __init__(self, names: Callable[[int], str]) -> None:
        self._names = names

    def __call__(self, position: int) -> str:
        return f"{self._names(position)}.grad"


class Registered:
    """Notes what modules and lists have, for one inventory; with torch functions disabled."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        plain = inventory.plain_tensors
        self._plain = frozenset(map(id, plain))
        self.is_possible = inventory.reader is not None and inventory.reader.is_fast
        if self.is_possible:
            base: Any = plain[0]
            self._is_cpu, self._is_leaf = base.is_cpu.__get__, base.is_leaf.__get__
            self._gradient = base.grad.__get__

    def note(
        self, root: str, paths: Paths, modules: Sequence[Any], registries: Sequence[Any]
    ) -> Iterator[tuple[str, str, Any]]:
        """Note what the dictionaries of some modules hold.

        Yields what has to be looked at alone: the module's name, the tensor's, and the tensor.
        """
        names = Names(root, paths, modules)
        tensors = names.fill(registries)
        for position in self.note_tensors(tensors, names):
            yield (*names.of(position), tensors[position])

    def note_tensors(self, tensors: Sequence[Any], names: Callable[[int], str]) -> Iterator[int]:
        """Note tensors, which have their names by their positions.

        Yields the positions of those that have to be looked at alone.
        """
        gradients = NamesOfGradients(names)
        for start in range(0, len(tensors), AT_ONCE):
            some: Sequence[Any] = tensors[start : start + AT_ONCE]
            positions: Sequence[int] = range(start, start + len(some))
            kinds = ids_of_types(some)
            if id(type(None)) in kinds:  # A layer without a bias, say.
                there = list(map(is_not, some, repeat(None)))
                some, positions = list(compress(some, there)), list(compress(positions, there))
                kinds.discard(id(type(None)))
            if not (kinds <= self._plain and self._note_all(some, positions, names, gradients)):
                yield from positions

    def _note_all(
        self,
        tensors: Sequence[Any],
        positions: Sequence[int],
        names: Callable[[int], str],
        of_gradients: NamesOfGradients,
    ) -> bool:
        """Note plain tensors and their gradients; False if that has to be done one by one."""
        if not (
            self.is_possible
            # Each refers to its class, and only one with attributes to anything else. Asking
            # others than leaves for a gradient warns.
            and len(get_referents(*tensors)) == len(tensors)
            and all(map(self._is_cpu, tensors))
            and all(map(self._is_leaf, tensors))
        ):
            return False
        gradients = list(map(self._gradient, tensors))
        kinds = ids_of_types(gradients)
        if id(type(None)) in kinds:
            there = list(map(is_not, gradients, repeat(None)))
            gradients = list(compress(gradients, there))
            kinds.discard(id(type(None)))
            their_positions: Sequence[int] = list(compress(positions, there))
        else:
            their_positions = positions
        if not (kinds <= self._plain and all(map(self._is_cpu, gradients))):
            return False
        noted = self._note(tensors, positions, names)
        return noted and self._note(gradients, their_positions, of_gradients)

    def _note(self, tensors: Sequence[Any], positions: Sequence[int], names: Any) -> bool:
        inventory = self._inventory
        reader = inventory.reader
        assert reader is not None
        try:
            keys = list(map(reader.address, tensors))
        except NotImplementedError:  # A sparse tensor has several storages.
            return False
        known = inventory.known
        if not known.isdisjoint(keys) or len(set(keys)) < len(keys):
            # What is noted already, and tied weights.
            fresh: dict[int, tuple[int, Any]] = {}
            for key, position, tensor in zip(keys, positions, tensors, strict=True):
                if key not in known:
                    fresh.setdefault(key, (position, tensor))
            keys, positions = list(fresh), [position for position, _ in fresh.values()]
            tensors = [tensor for _, tensor in fresh.values()]
        weak, sizes, is_own = reader.note_all(tensors)
        if not (all(is_own) and all(sizes)):
            is_plain = [own and size for own, size in zip(is_own, sizes, strict=True)]
            odd = list(map(not_, is_plain))
            for position, tensor in compress(zip(positions, tensors, strict=True), odd):
                inventory.add("", names(position), tensor)
            for number in compress(weak, odd):
                reader.free(number)
            weak, sizes = list(compress(weak, is_plain)), list(compress(sizes, is_plain))
            keys, positions = list(compress(keys, is_plain)), list(compress(positions, is_plain))
        inventory.enter_all(weak, keys, sizes, names, positions)
        return True
