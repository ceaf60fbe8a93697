"""What is left of a released object: its name, and one clear error for every further use.

Looking at one is no use of it: destructors, debuggers and pretty-printers ask `hasattr`, take
the truth value, and read attributes that may be missing. They get the answers that they expect
of an object that has nothing, so reading an attribute raises an AttributeError as well.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from types import FrameType, MemberDescriptorType
from typing import Any, NamedTuple, NoReturn

from torch_utils._releasing.classes import bases_of, contents_of_class
from torch_utils._releasing.classes import name_of as class_name
from torch_utils._runtime import early_bound
from torch_utils.errors import ReleasedAttributeError, ReleasedError

_PACKAGE = __name__.partition(".")[0]
_KEY = "_released"  # Where a released object's dictionary holds its Epitaph.
_read: Callable[[Any, str], Any] = object.__getattribute__
_frame = sys._getframe


Name = Callable[[int, type], str]


class Epitaph(NamedTuple):
    """What a released object was; many may share one.

    Attributes:
        name: What messages call it; for many, what says so by the id of one and its class.
    """

    kind: type
    name: str | Name
    place: str


@early_bound
def name_of(tombstone: Any) -> str:
    """Return what messages call a released object."""
    kind, name, _ = _read(tombstone, "__dict__")[_KEY]
    known: str = name if type(name) is str else name(id(tombstone), kind)
    return known


@early_bound
def refuse(tombstone: Any, use: str, kind: type[ReleasedError] = ReleasedError) -> NoReturn:
    """Raise the error of a released object. Destructors get here at any time."""
    place = _read(tombstone, "__dict__")[_KEY].place
    error = kind(
        f"{name_of(tombstone)} was released {place} and its weights are gone, so {use!r} cannot "
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
    """Do nothing: to close what is gone, or to leave a block with it, is no use of it."""


async def _nothing_to_await(*args: object, **kwargs: object) -> None:
    """Do nothing, for `aclose` and ``async with``."""


_READABLE = frozenset((*dir(object), "__dict__", "__call__"))
# What destructors and the ends of blocks may still ask, if the object had it.
_CLOSING = {"close": _nothing, "aclose": _nothing_to_await, "closed": True}


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
        if name == "__class__":
            return _read(self, "__dict__")[_KEY].kind
        if name == "__module__":
            return _read(self, "__dict__")[_KEY].kind.__module__
        if name in _READABLE:
            return _read(self, name)
        if name in _CLOSING and hasattr(_read(self, "__dict__")[_KEY].kind, name):
            return _CLOSING[name]
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
        return f"<released {name_of(self)}>"

    __str__ = __repr__
    __format__ = object.__format__
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __exit__ = _nothing
    __aexit__ = _nothing_to_await

    @early_bound
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "pickle")

    # Nothing, in C: the destructor of the former class must not run on what is empty, and an
    # interrupt at the first instruction of a function here would be printed, and lost.
    __del__ = object.__hash__


def _refusing(name: str) -> Any:
    @early_bound
    def method(self: Any, *args: object, **kwargs: object) -> NoReturn:
        refuse(self, name)

    method.__name__ = name
    return method


for _name in (
    *("__call__", "__len__", "__iter__", "__reversed__", "__contains__", "__enter__", "__aenter__"),
    *("__getitem__", "__setitem__", "__delitem__", "__copy__", "__deepcopy__"),
    *("__add__", "__iadd__", "__radd__", "__mul__", "__imul__", "__rmul__", "__matmul__"),
):
    setattr(Tombstone, _name, _refusing(_name))

# For classes whose instances have a layout of their own; it adds none.
_METHODS = {k: v for k, v in vars(Tombstone).items() if k not in ("__dict__", "__weakref__")}
_Quiet = type(
    "_Quiet",
    (),
    # Python tells the former class of every heir; that would be the program's code.
    {**_METHODS, "__slots__": (), "__init_subclass__": classmethod(_nothing)},
)


def is_released(thing: object) -> bool:
    """Say whether an object was released, without using it."""
    return "_is_tombstone" in contents_of_class(type(thing))


def is_tombstone_class(kind: type) -> bool:
    """Say whether a class is that of released objects."""
    return "_is_tombstone" in contents_of_class(kind)


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
    for slot in () if type(thing) is Tombstone else _slots_of(epitaph.kind):
        try:
            slot.__delete__(thing)
        except AttributeError:
            continue  # It is empty.
    if len(contents) > 1:
        # Another dictionary at once, for a thread that reads the name in the meantime.
        object.__setattr__(thing, "__dict__", {_KEY: epitaph})
        contents.clear()  # Somebody may have the old one.


class Burial:
    """`bury` for many modules, in steps of C: what is done with one costs less than a call.

    Each step comes to the same when it is done again, after an interrupt.

    Args:
        modules: None of them is a tombstone, unless another thread has just made it one.
        name: Says what messages call one of them.
        place: Where the program asked for the release.
    """

    def __init__(self, modules: Sequence[Any], name: Name, place: str) -> None:
        # First what they hold: if one is no tombstone after that, this is no tombstone's.
        contents = list(map(_read, modules, repeat("__dict__")))
        kinds = list(map(type, modules))
        distinct = dict(zip(map(id, kinds), kinds, strict=True))
        self._name = name
        self._place = place
        # Those of a class share one dictionary afterwards.
        lots = {key: {_KEY: Epitaph(kind, name, place)} for key, kind in distinct.items()}
        is_whole = [not is_tombstone_class(kind) for kind in kinds]
        self._modules = list(compress(modules, is_whole))
        self._contents = list(compress(contents, is_whole))
        self._lots = list(compress(map(lots.__getitem__, map(id, kinds)), is_whole))

    def finish(self) -> None:
        """Bury them."""
        modules, contents, lots = self._modules, self._contents, self._lots
        _run(map(dict.setdefault, contents, repeat(_KEY), map(dict.get, lots, repeat(_KEY))))
        try:
            _run(map(object.__setattr__, modules, repeat("__class__"), repeat(Tombstone)))
        except TypeError:  # A class with slots among them.
            for module in modules:
                bury(module, self._name(id(module), type(module)), self._place)
        _run(map(object.__setattr__, modules, repeat("__dict__"), lots))
        _run(map(dict.clear, contents))


def _run(calls: Iterable[Any]) -> None:
    deque(calls, maxlen=0)


def _slots_of(kind: type) -> list[MemberDescriptorType]:
    """List the slots that Python classes declare; those of C's types cannot be emptied."""
    slotted = [c for c in map(contents_of_class, bases_of(kind)) if "__slots__" in c]
    return [v for names in slotted for v in names.values() if type(v) is MemberDescriptorType]


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
    heir: type = maker.__new__(metaclass, class_name(former), (former,), {**names, "__slots__": ()})
    return heir


@early_bound
def caller() -> str:
    """Say where the program asked for the release: the nearest frame outside this package."""
    frame: FrameType | None = _frame(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in (_PACKAGE, "contextlib"):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return "by torch_utils"
