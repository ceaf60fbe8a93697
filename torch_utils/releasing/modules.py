"""Release modules and what trains them in place, and turn them into tombstones.

Weights are shared in two ways. Two modules may hold the same Parameter: a release removes only one
reference to it. Two models may contain the same submodule: it stays intact.

A released object is a tombstone, which raises one clear error on any further use. Destructors,
debuggers and pretty-printers may still inspect it by `hasattr`, truth value or `repr`. For them,
reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Set
from typing import Any, NamedTuple, NoReturn

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


class ModuleTarget(Target):
    """A module and what it contains.

    Attributes:
        tree: The module and its submodules with their paths.
        spared: The ids of submodules that an object outside uses as well.
    """

    def __init__(self, thing: Any, name: str, *, is_named: bool) -> None:
        super().__init__(thing, name, is_named=is_named)
        self.tree: list[tuple[Any, str]] = tree_of(thing)
        self.spared: Set[int] = frozenset()

    def spare(self, used: Set[int]) -> None:
        super().spare(used)
        self.spared = used - {id(self.thing)}

    def count(self, inventory: Inventory) -> None:
        # Shared weights count as well: the report says that they are still held.
        inventory.own_modules.update(id(module) for module, _ in self.tree)
        for module, path in self.tree:
            inventory.counts_staying = self.stays or id(module) in self.spared
            where = f"{self.name}.{path}" if path else self.name
            contents = contents_of(module)
            for registry in ("_parameters", "_buffers"):
                for name, tensor in entries_of(contents.get(registry)):
                    inventory.add_contents(f"{where}.{name}", tensor)
            for name, part in attributes_of(module).items():
                if name not in _OWN_PARTS:
                    inventory.add_contents(f"{where}.{name}", part)
                if name_of(type(part)) == "ScriptObject":  # Weights in C++, such as quantized ones.
                    inventory.is_partial = True

    def closers(self) -> list[Closer]:
        kept = [m for m, _ in self.tree if id(m) not in self.spared and not is_released(m)]
        return [closer for module in kept for closer in closers_of(module)]

    def give_up(self, place: str, trash: list[Any]) -> None:
        self.tree = []
        # From the root down: a thread that is using the model sees a tombstone, rather than a
        # layer without its weights.
        for module, path in tree_of(self.thing, self.spared):
            kind = name_of(type(module))
            name = f"{path!r} of {self.name} (a {kind})" if path else f"this {kind}"
            bury(module, name, place, trash)


class TrainingTarget(Target):
    """An optimizer, a learning-rate scheduler, a gradient scaler or a data loader."""

    def count(self, inventory: Inventory) -> None:
        for name, part in contents_of(self.thing).items():
            # Its parameters and data belong to others.
            for state in dict.values(part) if name == "state" and is_instance(part, dict) else ():
                inventory.add_contents(f"{self.name}.state", state)
            inventory.add_contents(self.name, part, is_expected=False)

    def closers(self) -> list[Closer]:
        return closers_of(self.thing)

    def give_up(self, place: str, trash: list[Any]) -> None:
        # A live learning-rate scheduler keeps the optimizer, which is empty then. The workers of a
        # loader end with its iterator, which goes to the trash.
        bury(self.thing, f"this {self.name}", place, trash)


# Attributes of every module. If a version of torch has more, they are searched in vain.
_OWN_PARTS = {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}


def tree_of(root: Any, spared: Set[int] = frozenset()) -> list[tuple[Any, str]]:
    """Return a module and its submodules with their paths ("" for the root), parents first.

    Spared and released modules are left out, with what only they contain.
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
    """Return the direct submodules of a module with their names."""
    torch: Any = whole_torch()
    contents = contents_of(module)
    entries = entries_of(contents.get("_modules"))
    # The module inside the shell of torch.jit.trace.
    entries.append(("", contents.get("_actual_script_module")))
    return [
        (name if type(name) is str else "?", child)
        for name, child in entries
        if is_instance(child, torch.nn.Module)
    ]


# Closing


class Closer(NamedTuple):
    """A method to call before anything is emptied, such as ``close`` or ``__del__``."""

    name: str
    thing: Any
    method: str


class Claim:
    """A thread's claim to call the closers of an object, each once.

    It keeps the object alive, so that its id stays its own.
    """

    __slots__ = ("called", "thing", "thread")

    def __init__(self, thing: Any, thread: int) -> None:
        self.thing = thing
        self.thread = thread
        self.called: set[str] = set()


CLAIMS: dict[int, Claim] = {}
"""The claims of all releases that are under way, by the ids of the objects."""


def closers_of(thing: Any) -> list[Closer]:
    """Return what to call before an object is emptied: its ``close()``, then its ``__del__``."""
    kind = type(thing)
    closers = []
    if is_method(find_in_class(kind, "close")):
        closers.append(Closer(f"{name_of(kind)}.close()", thing, "close"))
    if find_in_class(kind, "__del__") is not None:
        closers.append(Closer(f"{name_of(kind)}.__del__()", thing, "__del__"))
    return closers


class CloseTarget(Target):
    """An object with a ``close()`` method, such as a resource, which cannot be opened again."""

    is_silent = True

    def closers(self) -> list[Closer]:
        return [Closer(self.name, self.thing, "close")]


# Tombstones

_PACKAGE = __name__.partition(".")[0]
_KEY = "_released"  # The key of a released object's ReleaseRecord in its dictionary.
_read: Callable[[Any, str], Any] = object.__getattribute__


class ReleaseRecord(NamedTuple):
    """The class of a released object, its name in messages, and where it was released."""

    kind: type
    name: str
    place: str


@early_bound
def refuse(tombstone: Any, use: str, kind: type[ReleasedError] = ReleasedError) -> NoReturn:
    """Raise the error for the use of a released object. Destructors may call this."""
    record = _read(tombstone, "__dict__")[_KEY]
    error = kind(
        f"{record.name} was released {record.place}, so {use!r} cannot be used; load it again, "
        "or release it after its last use"
    )
    if isinstance(error, AttributeError):
        error.obj = None  # Otherwise Python suggests other attribute names.
    # Without a context: the program's own traceback is enough.
    raise error from None


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing. A released object may be closed, and its block may end."""


async def _nothing_to_await(*args: object, **kwargs: object) -> None:
    """Do nothing; for `aclose` and ``async with``."""


_READABLE = frozenset((*dir(object), "__dict__", "__call__"))
# Destructors and the ends of blocks may still use these, if the object had them.
_CLOSING = {"close": _nothing, "aclose": _nothing_to_await, "closed": True}


class Tombstone:
    """The class of a released object.

    The object keeps its identity but is empty. `isinstance` still reports the former class, so
    that code that checks the type reaches the clear error. The object is true, equal only to
    itself, and has only the attributes of every object.
    """

    _is_tombstone = True

    @early_bound
    def __getattribute__(self, name: str) -> Any:
        former = _read(self, "__dict__")[_KEY].kind
        if name == "__class__":
            return former
        if name == "__module__":
            return former.__module__
        if name in _READABLE:
            return _read(self, name)
        if name in _CLOSING and hasattr(former, name):
            return _CLOSING[name]
        return refuse(self, name, ReleasedAttributeError)

    # A former class with slots, from which the tombstone derives, may define its own.
    __getattr__ = __getattribute__

    @early_bound
    def __setattr__(self, name: str, value: object) -> None:
        refuse(self, name, ReleasedAttributeError)

    @early_bound
    def __delattr__(self, name: str) -> None:
        refuse(self, name, ReleasedAttributeError)

    @early_bound
    def __dir__(self) -> list[str]:
        return dir(object)

    def __bool__(self) -> bool:
        return True  # For ``if self.model`` in destructors.

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

    # A C function that does nothing. The former class's destructor must not run on the empty
    # object, and an interrupt in a Python function here would be printed and lost.
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

# For classes whose instances have a layout of their own, which this leaves as it is.
_METHODS = {k: v for k, v in vars(Tombstone).items() if k not in ("__dict__", "__weakref__")}
_Quiet = type(
    "_Quiet",
    (),
    # Otherwise Python would call the former class's __init_subclass__.
    {**_METHODS, "__slots__": (), "__init_subclass__": classmethod(_nothing)},
)


def bury(thing: Any, name: str, place: str, trash: list[Any]) -> None:
    """Turn an object into a tombstone and empty it. Idempotent, also after an interrupt.

    In this order, a thread that is using the object sees the tombstone, never half an object. The
    dictionary and the slots are emptied, which also breaks cycles. Weights that a live model
    shares stay intact. Of two threads, the first one determines the message. What was taken out
    goes to ``trash``: dropping it may run destructors of the program.
    """
    contents = object.__getattribute__(thing, "__dict__")
    record = contents.setdefault(_KEY, ReleaseRecord(type(thing), name, place))
    if not is_released(thing):
        try:
            object.__setattr__(thing, "__class__", Tombstone)
        except TypeError:
            object.__setattr__(thing, "__class__", _tombstone_subclass(record.kind))
    # A plain tombstone has no slots.
    for slot in () if type(thing) is Tombstone else slots_of(record.kind):
        try:
            trash.append(slot.__get__(thing))
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # The slot is empty, or a read-only field of a C class.
    if len(contents) > 1:
        # A new dictionary first, for a thread that reads the name meanwhile.
        object.__setattr__(thing, "__dict__", {_KEY: record})
        for key in list(contents):  # Another thread may use the old one.
            if key is not _KEY:
                trash.append(contents.pop(key, None))


def stand_in(thing: Any, name: str, place: str) -> Tombstone:
    """Return a tombstone for an object that stays, for the owner that has let it go."""
    tombstone = object.__new__(Tombstone)
    object.__getattribute__(tombstone, "__dict__")[_KEY] = ReleaseRecord(type(thing), name, place)
    return tombstone


def _tombstone_subclass(former: type) -> type:
    """Return a tombstone class that derives from a class with an instance layout of its own.

    These are classes with __slots__ and classes whose first base is an ABC. Neither the constructor
    of the metaclass nor `__init_subclass__`, which are the program's code, is called. The former
    class keeps the result in its list of subclasses.
    """
    known: type
    for known in type.__subclasses__(former):
        if is_tombstone_class(known):
            return known
    # The MRO puts _Quiet before the former class's bases. It cannot be a base itself, because the
    # first base determines the layout.
    metaclass = type.__new__(
        type, "Meta", (type(former),), {"mro": lambda cls: [cls, _Quiet, *bases_of(former)]}
    )
    maker = ABCMeta if issubclass(metaclass, ABCMeta) else type
    names = {name: _METHODS[name] for name in ("_is_tombstone", "__module__", "__doc__")}
    kind: type = maker.__new__(metaclass, name_of(former), (former,), {**names, "__slots__": ()})
    return kind
