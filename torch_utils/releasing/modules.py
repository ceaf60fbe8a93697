"""Modules: closed, emptied in place, and what is left of them.

Weights are shared in two ways. Two modules may hold the same Parameter: each then loses only
its own reference. Or two models may contain the same submodule: that one is left whole.

What is left of a released object is a tombstone: its name, and one clear error for every further
use. Looking at one is not a use: destructors, debuggers and pretty-printers ask `hasattr`, take the
truth value, and read attributes that may be missing. They get the answers that they expect of an
object that has nothing, so reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Set
from operator import getitem
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from torch_utils._coroutines import UNAWAITED, never_ran
from torch_utils._runtime import early_bound, whole_torch
from torch_utils.errors import ReleasedAttributeError, ReleasedError
from torch_utils.releasing.objects import (
    attributes_of,
    bases_of,
    contents_of,
    entries_of,
    find_in_class,
    is_instance,
    is_method,
    is_released,
    is_tombstone_class,
    name_of,
    slots_of,
)
from torch_utils.releasing.storages import Inventory, Target
from torch_utils.resource import Resource


class ModuleTarget(Target):
    """A module and what it contains.

    Attributes:
        tree: Both, with their paths, until it is given up.
        shared: The ids of submodules that a live model contains too.
    """

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name)
        self.tree: list[tuple[Any, str]] = tree_of(module)
        self.shared: Set[int] = frozenset()

    def count(self, inventory: Inventory) -> None:
        # What is shared too: this model lets go of it, and the report says that it lives on.
        inventory.own_modules.update(id(module) for module, _ in self.tree)
        for module, path in self.tree:
            where = f"{self.name}.{path}" if path else self.name
            contents = contents_of(module)
            for registry in ("_parameters", "_buffers"):
                for name, tensor in entries_of(contents.get(registry)):
                    inventory.add_contents(f"{where}.{name}", tensor)
            for name, part in attributes_of(module).items():
                if name not in _OWN_PARTS:
                    inventory.add_contents(f"{where}.{name}", part)

    def give_up(self, place: str) -> None:
        if is_released(self.thing):
            return  # By its own ``close()``, or by another thread.
        self.tree = []  # A ``close()`` may have changed the model, so it is read again.
        # From the root down: a thread that is computing with the model meets a tombstone,
        # and not a layer without its weights.
        for module, path in tree_of(self.thing, self.shared):
            kind = name_of(type(module))
            name = f"{path!r} of {self.name} (a {kind})" if path else f"this {kind}"
            bury(module, name, place)


# What every module has; nothing is lost if a version of torch has more.
_OWN_PARTS = {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}


def tree_of(root: Any, spared: Set[int] = frozenset()) -> list[tuple[Any, str]]:
    """List a module and all that it contains, with their paths ("" for the root).

    Each once, and before what it contains. Those that are spared or were released are left out,
    with what only they contain.
    """
    found: list[tuple[Any, str]] = []
    seen = {*spared, id(root)}
    pending = [] if is_released(root) else [(root, "", reversed(children_of(root)))]
    while pending:
        module, path, children = pending[-1]
        for name, child in children:
            if id(child) not in seen and not is_released(child):
                seen.add(id(child))
                below = f"{path}.{name}" if path and name else path or name
                pending.append((child, below, reversed(children_of(child))))
                break
        else:
            found.append((module, path))
            pending.pop()
    return found[::-1]


def children_of(module: Any) -> list[tuple[str, Any]]:
    """List the modules that a module contains, with their names."""
    torch: Any = whole_torch()
    contents = contents_of(module)
    entries = entries_of(contents.get("_modules"))
    # What torch.jit.trace puts a shell around.
    entries.append(("", contents.get("_actual_script_module")))
    return [
        (name if type(name) is str else "?", child)
        for name, child in entries
        if is_instance(child, torch.nn.Module)
    ]


# Closing


class ClosableTarget(Target):
    """Something with ``close()``, which knows itself what to do."""

    closes = True

    def give_up(self, place: str) -> None:
        result = self.thing.close()
        if type(result) in UNAWAITED:
            raise never_ran(result)


class ModuleCloseTarget(Target):
    """The ``close()`` of one module that is about to be released.

    Args:
        unprepared: All of one tree, until the first of them is called: a ``close()`` may call
            others.
    """

    closes = True

    def __init__(self, module: Any, unprepared: list[ModuleCloseTarget]) -> None:
        super().__init__(module, f"{name_of(type(module))}.close()")
        self._unprepared = unprepared

    def give_up(self, place: str) -> None:
        """Call it, unless the program itself or another release did since it was planned."""
        while self._unprepared:
            self._unprepared.pop()._prepare()
        if is_released(self.thing):
            return
        if is_instance(self.thing, Resource):
            Resource.close(self.thing)
            return
        result = _close_once(self.thing)()
        if type(result) in UNAWAITED:
            raise never_ran(result)

    def _prepare(self) -> None:
        if not is_released(self.thing) and not is_instance(self.thing, Resource):
            _close_once(self.thing)


class _Once:
    """A method that runs once, also where another module's ``close()`` calls it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._left = [method]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            method = self._left.pop()
        except IndexError:
            return None
        return method(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The module's own code may copy or save the module: that one then closes itself.
        return getitem, ([self._method], 0)


def _close_once(module: Any) -> Any:
    """Put what runs ``close()`` once in front of it, where the program's own calls find it too."""
    contents = contents_of(module)
    own = contents.get("close")
    if type(own) is _Once:
        return own
    if callable(own):
        contents["close"] = once = _Once(own)
        return once
    found = find_in_class(type(module), "close")  # A function, a static method, any callable.
    bind = find_in_class(type(found), "__get__")
    bound = found if bind is None else bind(found, module, type(module))
    return contents.setdefault("close", _Once(bound))  # Another thread may be quicker.


def closes_of(
    tree: list[tuple[Any, str]], spared: Set[int], seen: set[int]
) -> list[ModuleCloseTarget]:
    """Plan what the modules of a tree close themselves, each module once."""
    unprepared: list[ModuleCloseTarget] = []
    for module, _ in tree:
        method = None if is_released(module) else find_in_class(type(module), "close")
        if not is_method(method) or id(module) in seen or id(module) in spared:
            continue
        seen.add(id(module))
        unprepared.append(ModuleCloseTarget(module, unprepared))
    return list(unprepared)


# What is left

_PACKAGE = __name__.partition(".")[0]
_KEY = "_released"  # Where a released object's dictionary holds its Epitaph.
_read: Callable[[Any, str], Any] = object.__getattribute__
_frame = sys._getframe


class Epitaph(NamedTuple):
    """What a released object was: its class, what messages call it, and where it was released."""

    kind: type
    name: str
    place: str


@early_bound
def refuse(tombstone: Any, use: str, kind: type[ReleasedError] = ReleasedError) -> NoReturn:
    """Raise the error of a released object. Destructors get here at any time."""
    epitaph = _read(tombstone, "__dict__")[_KEY]
    error = kind(
        f"{epitaph.name} was released {epitaph.place} and its weights are gone, so {use!r} cannot "
        "be used; load it again, or release it after its last use"
    )
    if isinstance(error, AttributeError):
        error.obj = None  # Else Python notes the object, and suggests names that it has.
    # Chained to nothing: what led here is the program's own traceback.
    raise error from None


@early_bound
def _is_in_torch(frame: FrameType | None) -> bool:
    """Say whether a frame runs what every module inherits; None where C asks by itself."""
    return frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module"


@early_bound
def _refuse_attribute(tombstone: Any, name: str) -> NoReturn:
    """Raise for an attribute: as a missing one, but to torch walking a live module's children.

    That happens in properties (``model.device``), and a module that meets an AttributeError in
    one of its properties says that it has no such property.
    """
    in_torch = _is_in_torch(_frame(1).f_back)
    refuse(tombstone, name, ReleasedError if in_torch else ReleasedAttributeError)


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: closing a released object, or leaving its block, is allowed."""


async def _nothing_to_await(*args: object, **kwargs: object) -> None:
    """Do nothing, for `aclose` and ``async with``."""


_READABLE = frozenset((*dir(object), "__dict__", "__call__"))
# What destructors and the ends of blocks may still ask, if the object had it.
_CLOSING = {"close": _nothing, "aclose": _nothing_to_await, "closed": True}


class _Shown:
    """What the ``__repr__`` of an object that holds a released one reads of it: nothing."""

    def __call__(self, *args: object, **kwargs: object) -> _Shown:
        return self

    __getattr__ = __call__

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<released>"


_SHOWN = _Shown()


class Tombstone:
    """The class that a released object has afterwards.

    The object stays the same object, empty; `isinstance` still says what it was, so that code
    that checks before it calls gets to the error that explains. It is true in a boolean
    context, equal to itself only, and has no attribute but what every object has.
    """

    _is_tombstone = True

    @early_bound
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__" and _is_in_torch(_frame(0).f_back):
            # A thread that was in `Module.__getattr__` all the while.
            refuse(self, name, ReleasedAttributeError)
        former = _read(self, "__dict__")[_KEY].kind
        if name == "__class__":
            return former
        if name == "__module__":
            return former.__module__
        if name in _READABLE:
            return _read(self, name)
        if name in _CLOSING and hasattr(former, name):
            return _CLOSING[name]
        reader = _frame(0).f_back
        if reader is not None and reader.f_code.co_name in ("__repr__", "__str__"):
            return _SHOWN
        return _refuse_attribute(self, name)

    # A former class with slots, which its tombstone inherits, may have one of its own.
    __getattr__ = __getattribute__

    @early_bound
    def __setattr__(self, name: str, value: object) -> None:
        _refuse_attribute(self, name)

    @early_bound
    def __delattr__(self, name: str) -> None:
        _refuse_attribute(self, name)

    @early_bound
    def __dir__(self) -> list[str]:
        return dir(object)

    def __bool__(self) -> bool:
        return True  # ``if self.model`` in somebody's destructor asks whether there was one.

    @early_bound
    def __repr__(self) -> str:
        return f"<released {_read(self, '__dict__')[_KEY].name}>"

    # Types as comments: annotations would become attributes of every tombstone.
    __str__ = __repr__
    __format__ = object.__format__  # type: Any
    __hash__ = object.__hash__  # type: Any
    __eq__ = object.__eq__  # type: Any
    __ne__ = object.__ne__  # type: Any
    __exit__ = _nothing
    __aexit__ = _nothing_to_await

    @early_bound
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "pickle")

    # Nothing, in C: the destructor of the former class must not run on what is empty, and an
    # interrupt at the first instruction of a function here would be printed, and lost.
    __del__ = object.__hash__  # type: Any


def _refusing(name: str) -> Any:
    @early_bound
    def method(self: Any, *args: object, **kwargs: object) -> NoReturn:
        refuse(self, name)

    method.__name__ = name
    return method


_REFUSED = (
    "call len iter next reversed contains enter aenter getitem setitem delitem copy deepcopy "
    "add iadd radd mul imul rmul matmul"
)
for _name in _REFUSED.split():
    setattr(Tombstone, f"__{_name}__", _refusing(f"__{_name}__"))

# For classes whose instances have a layout of their own; it adds none.
_METHODS = {k: v for k, v in vars(Tombstone).items() if k not in ("__dict__", "__weakref__")}
_Quiet = type(
    "_Quiet",
    (),
    # Python tells the former class of every heir; that would be the program's code.
    {**_METHODS, "__slots__": (), "__init_subclass__": classmethod(_nothing)},
)


def bury(thing: Any, name: str, place: str) -> None:
    """Make an object a tombstone, and empty it; one that is one already stays what it is.

    In this order: a thread that is using the object meets the tombstone, never half an object.
    Everything that its dictionary and its slots held is dropped, cycles through it included.
    What others refer to as well (a weight shared with a live model) is untouched. Done twice, or
    again after it was interrupted anywhere, it comes to the same; of two threads the first has
    its say.
    """
    contents = object.__getattribute__(thing, "__dict__")
    epitaph = contents.setdefault(_KEY, Epitaph(type(thing), name, place))
    if not is_released(thing):
        try:
            object.__setattr__(thing, "__class__", Tombstone)
        except TypeError:
            object.__setattr__(thing, "__class__", _heir_of(epitaph.kind))
    # Only an heir has slots; a plain tombstone's layout has none.
    for slot in () if type(thing) is Tombstone else slots_of(epitaph.kind):
        try:
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # It is empty, or a read-only field of a class made in C.
    if len(contents) > 1:
        # Another dictionary at once, for a thread that reads the name in the meantime.
        object.__setattr__(thing, "__dict__", {_KEY: epitaph})
        for key in list(contents):  # Another thread may have the old one.
            if key is not _KEY:
                contents.pop(key, None)


def _heir_of(former: type) -> type:
    """Make a tombstone that derives from a class whose instances have a layout of their own.

    Those with __slots__, and those whose first base is an ABC. The former class is not told of
    it: neither its metaclass's constructor nor its `__init_subclass__` runs, which are the
    program's. It keeps its heir, since it knows its subclasses.
    """
    known: type
    for known in type.__subclasses__(former):
        if is_tombstone_class(known):
            return known
    # _Quiet comes before all of the former class's bases, but cannot be a base itself: a first
    # base decides the layout.
    metaclass = type.__new__(
        type, "HeirType", (type(former),), {"mro": lambda cls: [cls, _Quiet, *bases_of(former)]}
    )
    maker = ABCMeta if issubclass(metaclass, ABCMeta) else type
    names = {name: _METHODS[name] for name in ("_is_tombstone", "__module__", "__doc__")}
    heir: type = maker.__new__(metaclass, name_of(former), (former,), {**names, "__slots__": ()})
    return heir
