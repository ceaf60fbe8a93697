"""Targets: what each kind of object gives up at its release, and the tombstone that remains.

Weights are shared in two ways. Two modules may hold the same Parameter: a release removes only one
reference to it. Two models may contain the same submodule: it stays intact.

A released object is a tombstone, which raises one clear error on any further use. Destructors,
debuggers and pretty-printers may still inspect it by `hasattr`, truth value or `repr`. For them,
reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

import gc
import sys
from _thread import get_ident
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from weakref import ReferenceType, ref

from torch_utils._runtime import cuda_is_of_parent, early_bound, private, whole_torch
from torch_utils.errors import ReleasedAttributeError, ReleasedError
from torch_utils.releasing.objects import (
    CONTAINERS,
    TARGETS,
    Kind,
    Kinds,
    attributes_of,
    bases_of,
    contents_of,
    entries_of,
    find_in_class,
    is_among,
    is_index_class,
    is_instance,
    is_method,
    is_released,
    is_tombstone_class,
    name_of,
    parts_of,
    slots_of,
)
from torch_utils.releasing.storages import Inventory, is_plain


class Target:
    """One object to release.

    Attributes:
        name: Its name in reports.
        is_named: Whether the caller passed it, by itself or in a container.
        stays: Whether it stays whole, because an object outside uses it as well.
        tree: The modules in it with their paths; empty for everything but a module.
        is_silent: Whether using the object after its release would raise no error.
    """

    __slots__ = ("is_named", "name", "stays", "thing")
    is_tensor = False
    is_silent = False
    tree: list[tuple[Any, str]] = []  # noqa: RUF012  (never changed)

    def __init__(self, thing: Any, name: str, *, is_named: bool) -> None:
        self.thing = thing
        self.name = name
        self.is_named = is_named
        self.stays = False

    def spare(self, used: Set[int]) -> None:
        """Learn which contained objects, by their ids, are used by objects outside."""
        self.stays = not self.is_named and id(self.thing) in used

    def count(self, inventory: Inventory) -> None:
        """Add the storages that it will give up to the inventory."""

    def closers(self) -> list[Any]:
        """Return the `Closer`s to call before anything is emptied."""
        return []

    def depth(self) -> int:
        """Return how many objects it wraps that can only be emptied after it."""
        return 0

    def give_up(self, place: str, trash: list[Any]) -> int | None:
        """Release the object.

        Args:
            place: The line of the program that called for it.
            trash: Takes what was taken out, until no lock is held.

        Returns:
            The bytes of the host's memory that it freed outside of storages.
        """


# Modules


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
        usual = _parts_of_every_module(whole_torch())
        for module, path in self.tree:
            inventory.counts_staying = self.stays or id(module) in self.spared
            where = f"{self.name}.{path}" if path else self.name
            contents = contents_of(module)
            for registry in ("_parameters", "_buffers"):
                for name, tensor in entries_of(contents.get(registry)):
                    inventory.add_contents(f"{where}.{name}", tensor)
            for name, part in attributes_of(module).items():
                if name not in usual:
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


@lru_cache(maxsize=1)
def _parts_of_every_module(torch: Any) -> frozenset[str]:
    return frozenset(vars(torch.nn.Module()))


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


# Tensors

_LEVELS = 8  # of nested containers
_REBUILT = frozenset((list, tuple, dict, OrderedDict))
_PLAIN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


class TensorTarget(Target):
    """A tensor. One that the caller passed has no elements after its release."""

    __slots__ = ()
    is_tensor = True

    def count(self, inventory: Inventory) -> None:
        is_view = private(whole_torch(), "Tensor._is_view")
        # The base of a view keeps the memory.
        inventory.counts_staying |= is_view is not None and is_view(self.thing)
        inventory.add(self.name, self.thing)

    def give_up(self, place: str, trash: list[Any]) -> None:
        """Replace the object's C++ tensor by an empty one. Call this inside `without_overrides`.

        The new C++ tensor has the same class, dtype and device, and the shape (0,). The old one
        stays intact for its other users: views, arrays, DLPack capsules, autograd graphs,
        collectives, and functions in other threads, which own a reference. Changing ``data`` or
        calling `Tensor.set_` would change it for them as well. A *method* of this very tensor that
        another thread is running borrows the C++ tensor, and must have ended.

        Outputs of compiled code's CUDA graphs stay as they are: torch returns the same object
        again, and cannot swap it.

        Raises:
            RuntimeError: This torch cannot swap tensors, or not this one. It stays intact.
        """
        if not self.is_named:
            return  # The object that contains it lets it go.
        torch: Any = whole_torch()
        swap = private(torch, "_C._swap_tensor_impl")
        is_cached = private(torch, "_C._is_cached_tensor")
        if swap is None:
            raise RuntimeError(
                f"torch {torch.__version__} cannot empty a tensor in place, so it was left whole; "
                "delete the variables that refer to it instead"
            )
        if is_cached is not None and is_cached(self.thing):
            return
        base = torch.Tensor
        if base.is_cuda.__get__(self.thing) and cuda_is_of_parent(torch):
            return  # A forked child can neither use nor release it.
        retains_grad = base.retains_grad.__get__(self.thing)
        if retains_grad or base.is_leaf.__get__(self.thing):
            base.grad.__set__(self.thing, None)
        other = nothing_like(torch, self.thing)
        try:
            swap(self.thing, other)
        except RuntimeError as error:
            reason = "retain_grad() was called on it" if retains_grad else str(error)
            raise RuntimeError(
                f"this {self.name} cannot be emptied in place, because {reason}; use `del`"
            ) from None
        trash.append(other)
        base._backward_hooks.__set__(self.thing, None)
        contents = contents_of(self.thing)
        if contents:
            trash.append(dict(contents))
            contents.clear()
        if not is_plain(torch, self.thing):
            _empty_slots(self.thing, type(self.thing), trash)


def nothing_like(torch: Any, tensor: Any) -> Any:
    """Return an empty tensor with the dtype, device and gradient setting of another."""
    base = torch.Tensor
    dtype, device = base.dtype.__get__(tensor), base.device.__get__(tensor)
    needs_gradient = base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor)
    if base.is_quantized.__get__(tensor):
        return torch._empty_affine_quantized(
            (0,), scale=1.0, zero_point=0, dtype=dtype, device=device
        )
    if base.is_inference(tensor) != torch.is_inference_mode_enabled():  # It takes microseconds.
        with torch.inference_mode(base.is_inference(tensor)):
            return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)
    return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)


class HolderTarget(Target):
    """An object that holds models or tensors in attributes.

    Its models are targets of their own. In an attribute, also in containers, a tensor is replaced
    by an empty one, and a model that stays for others by a tombstone. The tensor or model itself,
    and a container that others may use, are not changed.
    """

    is_silent = True

    def __init__(self, thing: Any, name: str, *, is_named: bool) -> None:
        super().__init__(thing, name, is_named=is_named)
        self._spared: Set[int] = frozenset()

    def spare(self, used: Set[int]) -> None:
        super().spare(used)
        self._spared = used

    def give_up(self, place: str, trash: list[Any]) -> None:
        thing, self._place, self._kinds = self.thing, place, Kinds(whole_torch())
        if is_instance(thing, dict):
            self._let_go(thing, dict.items(thing), dict.__setitem__, trash)
        slots = {slot.__name__: slot for slot in slots_of(type(thing))}
        attributes = attributes_of(thing)
        filled = [name for name in attributes if name in slots]
        in_slots = [(slots[name], attributes.pop(name)) for name in filled]
        if attributes:
            self._let_go(contents_of(thing), attributes.items(), dict.__setitem__, trash)
        self._let_go(thing, in_slots, _set_slot, trash)

    def _let_go(self, owner: Any, items: Any, put: Any, trash: list[Any]) -> None:
        for key, value in list(items):
            emptied = self._without_tensors(value, _LEVELS)
            if emptied is not value:
                trash.append(value)
                put(owner, key, emptied)

    def _without_tensors(self, value: Any, levels: int) -> Any:
        kind = self._kinds(value)
        if kind is Kind.TENSOR:
            return nothing_like(whole_torch(), value)
        if kind in TARGETS and id(value) in self._spared:
            return stand_in(value, f"the {name_of(type(value))} of {self.name}", self._place)
        if kind not in CONTAINERS or kind is Kind.RECORD or not levels:
            return value
        parts = {id(part): part for part, _ in parts_of(value, "", self._kinds)}
        emptied = {key: self._without_tensors(part, levels - 1) for key, part in parts.items()}
        if all(emptied[key] is part for key, part in parts.items()):
            return value
        exact = type(value)
        is_mapping = exact is dict or exact is OrderedDict
        if exact not in _REBUILT or (is_mapping and not _PLAIN_KEYS.issuperset(map(type, value))):
            return None  # A copy would run code of the program, such as the hash of a key.
        if is_mapping:
            return exact((key, emptied.get(id(part), part)) for key, part in value.items())
        return exact(emptied.get(id(part), part) for part in value)


def _set_slot(owner: Any, slot: Any, value: Any) -> None:
    slot.__set__(owner, value)


# Indexes. A Python proxy owns its C++ index or points at one with another owner. An index that
# wraps another one (IndexIDMap, IndexIVF with its quantizer) keeps the inner proxy in its list
# ``referenced_objects`` and uses the bare pointer. Destroying the inner index would make it crash.


class FaissTarget(Target):
    """A faiss index of any kind.

    Its proxy becomes a tombstone first, so that no thread can start to use it. Then the C++ object
    is destroyed. If another thread or another index is using it, the proxy is restored instead.
    """

    def count(self, inventory: Inventory) -> None:
        inventory.is_partial = True  # the graphs and lists around the vectors

    def depth(self) -> int:
        return sum(1 for _ in _parts_of(self.thing))

    def sizes(self) -> list[tuple[ReferenceType[Any], int]]:
        """Return the bytes of the vectors that it owns, and those of each inner index."""
        if not self.thing.thisown:
            return []
        return [(ref(one), _code_bytes(one)) for one in (self.thing, *_parts_of(self.thing))]

    def give_up(self, place: str, trash: list[Any]) -> int | None:
        index = self.thing
        sizes = self.sizes()
        kind, contents = type(index), dict(contents_of(index))
        proxied = contents.get("this")
        bury(index, f"this {self.name}", place, [])
        if proxied is None or not proxied.own():
            return None
        reason = _reason_to_keep(index, self.name)
        if reason:
            # In this order, other threads see either the tombstone or the whole index.
            left = contents_of(index)
            left.update(contents)
            object.__setattr__(index, "__class__", kind)
            for key in left.keys() - contents.keys():
                left.pop(key)
            raise RuntimeError(reason)
        del proxied
        contents.clear()
        return sum(nbytes for one, nbytes in sizes if (part := one()) is None or part is index)


def _code_bytes(index: Any) -> int:
    """Return the bytes of the stored vectors, without the graphs and lists around them."""
    for name in ("index", "storage"):  # An inner index, which it may own.
        inner = getattr(index, name, None)
        if inner is not None:
            return _code_bytes(_downcast(inner)) if getattr(index, "own_fields", False) else 0
    size = getattr(index, "code_size", None)
    try:
        size = index.sa_code_size() if size is None else size
    except (AttributeError, RuntimeError):  # It has no code size.
        return 0
    return int(index.ntotal) * int(size)


def _downcast(index: Any) -> Any:
    """Return a proxy of the index's real class; a field returns one of the base class."""
    name = "downcast_IndexBinary" if hasattr(index, "code_size") else "downcast_index"
    downcast = getattr(sys.modules.get("faiss"), name, None)
    return index if downcast is None else downcast(index)


def _parts_of(index: Any) -> Iterator[Any]:
    """Yield the inner indexes that Python owns, which may be destroyed with the outer one."""
    for part in contents_of(index).get("referenced_objects", ()):
        if is_index_class(bases_of(type(part))) and part.thisown:
            yield part
            yield from _parts_of(part)


def _reason_to_keep(index: Any, name: str) -> str:
    if is_among(index, _arguments_in_faiss()):
        return f"another thread is using this {name}, so it was not released; release it later"
    lists = [r for r in gc.get_referrers(index) if type(r) is list]
    if lists and any(_refers_from(owner, lists) for owner in gc.get_referrers(*lists)):
        return (
            f"another faiss index uses this {name}, so it was not released; release the other "
            "index first, or pass both in that order"
        )
    return ""


def _arguments_in_faiss() -> Iterator[Any]:
    """Yield the variables of faiss's functions that run in other threads."""
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = None if thread == get_ident() else top
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if type(name) is str and name.partition(".")[0] == "faiss":
                for value in list(frame.f_locals.values()):
                    yield value
                    if type(value) in (tuple, list, dict):  # ``*args``
                        yield from gc.get_referents(value)
            frame = frame.f_back


def _refers_from(owner: Any, lists: list[Any]) -> bool:
    """Return whether one of the lists is the owner's ``referenced_objects``."""
    # The owner is a dictionary, or a proxy that has no dictionary of its own yet.
    contents = owner
    if type(owner) is not dict:
        try:
            contents = contents_of(owner)
        except AttributeError:
            return False
    found = dict.get(contents, "referenced_objects") if type(contents) is dict else None
    return is_among(found, lists)


TARGET_OF: dict[Kind, type[Target]] = {
    Kind.MODULE: ModuleTarget,
    Kind.TENSOR: TensorTarget,
    Kind.TRAINING: TrainingTarget,
    Kind.INDEX: FaissTarget,
    Kind.RESOURCE: CloseTarget,
    Kind.CLOSABLE: CloseTarget,
}


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


@early_bound
class Tombstone:
    """The class of a released object.

    The object keeps its identity but is empty. `isinstance` still reports the former class, so
    that code that checks the type reaches the clear error. The object is true, equal only to
    itself, and has only the attributes of every object.
    """

    _is_tombstone = True

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

    def __setattr__(self, name: str, value: object = None) -> None:
        refuse(self, name, ReleasedAttributeError)

    __delattr__ = __setattr__

    def __dir__(self) -> list[str]:
        return dir(object)

    def __bool__(self) -> bool:
        return True  # For ``if self.model`` in destructors.

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
    if type(thing) is not Tombstone:  # A plain tombstone has no slots.
        _empty_slots(thing, record.kind, trash)
    if len(contents) > 1:
        # A new dictionary first, for a thread that reads the name meanwhile.
        object.__setattr__(thing, "__dict__", {_KEY: record})
        for key in list(contents):  # Another thread may use the old one.
            if key is not _KEY:
                trash.append(contents.pop(key, None))


def _empty_slots(thing: Any, kind: type, trash: list[Any]) -> None:
    for slot in slots_of(kind):
        try:
            trash.append(slot.__get__(thing))
            slot.__delete__(thing)
        except (AttributeError, TypeError):
            continue  # The slot is empty, or a read-only field of a C class.


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
