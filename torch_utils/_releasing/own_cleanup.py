"""What modules clean up themselves: their own ``close`` and destructor, before they are emptied.

A module's class may define either, and afterwards nobody would call them any more. They are
called for every module of a tree, a parent before what it contains, since its ``close`` may
need its parts; dropping the last reference goes that way too. Each is a target of its own, so
that an error is one step's error, and nothing that they raise keeps the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from operator import getitem, methodcaller
from typing import Any

from torch_utils._coroutines import UNAWAITED, never_ran
from torch_utils._interrupts import never_began
from torch_utils._registry import REGISTRY
from torch_utils._releasing.classes import isinstance_of, name_of
from torch_utils._releasing.kinds import find, is_function
from torch_utils._releasing.target import MethodTarget
from torch_utils._releasing.tombstone import is_released, is_tombstone_class
from torch_utils._releasing.trees import Tree, types_of
from torch_utils._runtime import is_shutting_down
from torch_utils.resource import Resource


def close_resource(resource: Any) -> BaseException | None:
    """Close a Resource; returns its error, which has been logged already."""
    entry = REGISTRY.get(id(resource))
    try:
        result = type(resource).close(resource)
    except BaseException as error:
        # The boundary of each object's cleanup; what came out of the release passes on later.
        if entry is not None and entry.error is error:
            return error
        raise
    if type(result) in UNAWAITED:
        raise never_ran(result)
    return None if entry is None else entry.error


class OwnCleanup(MethodTarget):
    """One method of one module that is about to be released.

    Attributes:
        unprepared: All of one tree, until the first of them is called: its own code may call
            the others.
    """

    def __init__(self, module: Any, method: str, unprepared: list[OwnCleanup]) -> None:
        super().__init__(module, f"{name_of(type(module))}.{method}()")
        self.method = method
        self.unprepared = unprepared
        # At exit what is open is closed, as ever; destructors are left to the interpreter.
        self.closes = method == "close"

    def give_up(self, place: str) -> BaseException | None:
        """Call it, unless the program itself or another release did since it was planned."""
        while self.unprepared:
            other = self.unprepared.pop()
            if other.closes or not is_shutting_down():
                other._prepare()
        module = self.thing
        if is_released(module):
            return None
        if self._is_of_resource():
            return close_resource(module)
        result = _once(module, self.method)()
        if type(result) in UNAWAITED:
            raise never_ran(result)
        return None

    def _is_of_resource(self) -> bool:
        return self.method == "close" and isinstance_of(self.thing, Resource)

    def _prepare(self) -> None:
        if not is_released(self.thing) and not self._is_of_resource():
            _once(self.thing, self.method)


class _Once:
    """A method that runs once, whoever calls it: the parent's ``close``, or a destructor."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._calls = iter([method])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Taken and called in one step, by one of several threads: see `_interrupts`.
        try:
            for result in map(methodcaller("__call__", *args, **kwargs), self._calls):
                return result
        except BaseException as error:
            if never_began(error):
                self._calls = iter([self._method])
            raise
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The module's own code may copy or save the module: that one then closes itself as ever.
        return getitem, ([self._method], 0)


def _once(module: Any, method: str) -> Any:
    """Put what runs a method once in front of it, where the program's own calls find it too."""
    contents = object.__getattribute__(module, "__dict__")
    own = contents.get(method)
    if type(own) is _Once:
        return own
    function = own if callable(own) else _bound(module, method)
    once = _Once(function)
    if own is None:
        return contents.setdefault(method, once)
    contents[method] = once
    return once


def _bound(module: Any, method: str) -> Any:
    """Return a class's method for a module: of any sort, static ones and callable objects too."""
    found = find(type(module), method)
    bind = find(type(found), "__get__")
    return found if bind is None else bind(found, module, type(module))


def own_cleanups(tree: Tree, spared: Set[int], seen: set[tuple[int, str]]) -> list[OwnCleanup]:
    """Plan what a tree of modules cleans up itself; each method of each module once."""
    known = {id(kind): _methods_of(kind) for kind in types_of(tree.modules)}
    found: list[OwnCleanup] = []
    unprepared: list[OwnCleanup] = []
    if not any(known.values()):  # As in most trees, which are not ordered for nothing.
        return found
    for module in tree.parents_first():
        for method in known.get(id(type(module)), ()):
            if (id(module), method) not in seen and id(module) not in spared:
                seen.add((id(module), method))
                found.append(OwnCleanup(module, method, unprepared))
    unprepared.extend(found)
    return found


_METHODS = ("close", "__del__")


def _methods_of(kind: type) -> tuple[str, ...]:
    """List which of the methods a class of modules defines."""
    if is_tombstone_class(kind):
        return ()
    found = [(name, find(kind, name)) for name in _METHODS]
    return tuple(n for n, m in found if m is not None and is_function(m))
