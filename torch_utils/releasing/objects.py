"""Read foreign objects without running any of their code.

`isinstance`, `hasattr`, iteration, equality and attributes may call code of the program, which may
be slow or have side effects. So classes are compared by identity, containers are read by the
methods of the built-in classes, and attributes come from the instance's dictionary and slots.
Dictionaries use the ids of classes as keys, because a metaclass may define their hash and equality.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import IntEnum, auto
from gc import is_tracked
from typing import Any
from weakref import CallableProxyType, ProxyType

from torch_utils.resource import Resource

Part = tuple[Any, str]
"""An object and its name in reports."""

_mro_of = type.__dict__["__mro__"].__get__
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__
class_contents = type.__dict__["__dict__"].__get__
"""Return the attributes that a class itself defines, as a mapping proxy."""


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases."""
    bases: tuple[type, ...] = _mro_of(kind)
    return bases


def name_of(kind: type) -> str:
    """Return a class's name, as a plain string."""
    return str.__str__(_name_of(kind))


def module_of(kind: type) -> str:
    """Return the name of a class's module, or an empty string."""
    name = _module_of(kind)
    return name if type(name) is str else ""


def package_of(kind: type) -> str:
    """Return the name of a class's package, or an empty string."""
    return module_of(kind).partition(".")[0]


def is_among(one: object, many: Iterable[object]) -> bool:
    """Return whether ``one`` is the same object as one of ``many``."""
    for other in many:  # noqa: SIM110  (`any` and a generator take three times as long.)
        if one is other:
            return True
    return False


def is_instance(thing: Any, kind: type) -> bool:
    """Return what `isinstance` would, without reading the object's ``__class__``."""
    return type(thing) is kind or is_among(kind, bases_of(type(thing)))


def find_in_class(kind: type, name: str) -> Any:
    """Return a class's attribute, unbound, or None."""
    for base in bases_of(kind):
        contents = class_contents(base)
        if name in contents:
            return contents[name]
    return None


def is_released(thing: object) -> bool:
    """Return whether an object was released, without using it."""
    return is_tombstone_class(type(thing))


def is_tombstone_class(kind: type) -> bool:
    """Return whether a class is a tombstone."""
    return "_is_tombstone" in class_contents(kind)


class Kind(IntEnum):  # The hash of an Enum would run in Python.
    """How `release` treats an object."""

    RELEASED = auto()
    LEAF = auto()  # Holds nothing; skipped in a container, refused as an argument.
    HARMLESS = auto()  # Holds nothing; skipped also as an argument, such as a tokenizer.
    ARRAY = auto()  # A numpy array; refused as an argument.
    MODULE = auto()
    TENSOR = auto()
    TRAINING = auto()  # Refers to objects of other owners: an optimizer, a DataLoader.
    INDEX = auto()
    RESOURCE = auto()
    CLOSABLE = auto()
    MAPPING = auto()
    ITEMS = auto()
    RECORD = auto()  # A container whose items are its attributes: a dataclass, a namespace.
    ITERATOR = auto()  # Can be read only once, such as a generator, a coroutine or a file.
    AWAITED = auto()  # Has a close() that is a coroutine function.
    STORAGE = auto()
    LIBRARY = auto()  # An object of a known library; its parts are searched as well.
    OTHER = auto()


LEAVES = frozenset((Kind.LEAF, Kind.HARMLESS, Kind.ARRAY, Kind.ITERATOR))
CONTAINERS = frozenset((Kind.MAPPING, Kind.ITEMS, Kind.RECORD))
TARGETS = frozenset((Kind.MODULE, Kind.TENSOR, Kind.TRAINING, Kind.INDEX, Kind.RESOURCE))

_LIBRARIES = {
    *("torch", "transformers", "tokenizers", "sentence_transformers", "accelerate"),
    *("diffusers", "peft", "safetensors", "huggingface_hub"),
}
_NAMES = {
    Kind.TRAINING: "torch.Optimizer torch.LRScheduler torch.GradScaler torch.DataLoader "
    "accelerate.AcceleratedScheduler",
    Kind.STORAGE: "torch.UntypedStorage torch.TypedStorage",
    Kind.OTHER: "torch.Dataset",
    Kind.ARRAY: "numpy.ndarray",
    # These accompany a model. Vocabularies are large and hold no tensors.
    Kind.HARMLESS: "tokenizers.Tokenizer transformers.PreTrainedTokenizerBase "
    "transformers.PreTrainedConfig transformers.PretrainedConfig transformers.GenerationConfig "
    "transformers.ProcessorMixin transformers.FeatureExtractionMixin "
    "transformers.ImageProcessingMixin",
}
_BY_NAME = {
    tuple(name.split(".")): kind for kind, names in _NAMES.items() for name in names.split()
}
_SEQUENCES = (list, tuple, set, frozenset, deque)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LEAF_CLASSES = (
    *(bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice, type),
    *(type(None), type(Ellipsis), type(NotImplemented), BaseException, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType),
    *(types.FrameType, types.TracebackType),
    *(property, staticmethod, classmethod, ProxyType, CallableProxyType),
)
SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# By the ids of classes.
_KIND_OF_CLASS: dict[int, Kind] = {
    **{id(kind): Kind.ITERATOR for kind in SUSPENDABLE},
    **{id(kind): Kind.MAPPING for kind in (dict, types.MappingProxyType)},
    **{id(kind): Kind.ITEMS for kind in (*_SEQUENCES, *_VIEWS)},
    **{id(kind): Kind.LEAF for kind in _LEAF_CLASSES},
}
# Packages of values. Subclasses of the first ones are values as well.
_VALUES = {
    *("datetime", "decimal", "fractions", "uuid", "pathlib", "enum", "ipaddress"),
    *("zoneinfo", "random", "logging"),
}
_OWN_VALUES = {
    *("_thread", "threading", "weakref", "_weakref", "functools", "operator", "typing", "re"),
    *("inspect", "contextvars", "_contextvars", "_random", "numpy", "string", "itertools"),
    *("array", "pandas", "pyarrow", "scipy", "asyncio", "concurrent", "multiprocessing"),
    *("queue", "_queue"),
}
_RECORD_MARKS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__")
_RECORD_PACKAGES = frozenset(("collections", "argparse", "types"))
_AWAITABLE_FLAGS = 0x80 | 0x200  # inspect's CO_COROUTINE and CO_ASYNC_GENERATOR


class Kinds:
    """Determine the kinds of objects, once for each class."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._known: dict[int, tuple[Kind, type]] = {}

    def __call__(self, thing: Any) -> Kind:
        kind = type(thing)
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = _kind_of(kind, self._torch), kind
        return known[0]


def _kind_of(kind: type, torch: Any) -> Kind:
    bases = bases_of(kind)
    if is_tombstone_class(kind):
        return Kind.RELEASED
    if torch is not None:
        if is_among(torch.nn.Module, bases):
            return Kind.MODULE
        if is_among(torch.Tensor, bases):
            return Kind.TENSOR
    if is_index_class(bases):
        return Kind.INDEX
    if is_among(Resource, bases):
        return Kind.RESOURCE
    kinds = [_KIND_OF_CLASS[id(base)] for base in bases if id(base) in _KIND_OF_CLASS]
    if Kind.ITERATOR in kinds:
        return Kind.ITERATOR
    names = [(package_of(base), name_of(base)) for base in bases]
    named = [_BY_NAME[name] for name in names if name in _BY_NAME]
    if named:
        return named[0]
    close = find_in_class(kind, "close")
    if close is not None and is_method(close):
        return Kind.AWAITED if _is_awaitable(close) else Kind.CLOSABLE
    if kinds:
        return next((k for k in (Kind.MAPPING, Kind.ITEMS) if k in kinds), Kind.LEAF)
    return _kind_of_others(kind, bases, {package for package, _ in names})


def _kind_of_others(kind: type, bases: tuple[type, ...], packages: set[str]) -> Kind:
    if packages & _VALUES:
        return Kind.LEAF
    if find_in_class(kind, "__next__") is not None:
        return Kind.ITERATOR
    if packages & _RECORD_PACKAGES or any(
        mark in class_contents(base) for base in bases for mark in _RECORD_MARKS
    ):
        return Kind.RECORD
    if package_of(kind) in _OWN_VALUES:
        return Kind.LEAF
    return Kind.LIBRARY if packages & _LIBRARIES else Kind.OTHER


def is_method(value: Any) -> bool:
    """Return whether a class's attribute is a method of any type."""
    return type(value) in (staticmethod, classmethod) or callable(value)


def _is_awaitable(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    code = function.__code__ if type(function) is types.FunctionType else None
    return code is not None and bool(code.co_flags & _AWAITABLE_FLAGS)


def is_index_class(bases: tuple[type, ...]) -> bool:
    """Return whether a class with these bases is a faiss index, without importing faiss."""
    faiss = sys.modules.get("faiss")
    return faiss is not None and any(
        is_among(getattr(faiss, name, None), bases) for name in ("Index", "IndexBinary")
    )


# The parts of an object

_SHOWN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


def contents_of(thing: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``, bypassing its class."""
    contents: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    return contents


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the slots that a class and its bases declare."""
    declaring = [c for c in map(class_contents, bases_of(kind)) if "__slots__" in c]
    return [v for contents in declaring for v in contents.values() if _is_slot(v)]


def _is_slot(value: object) -> bool:
    return type(value) is types.MemberDescriptorType


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes in an instance's dictionary and slots."""
    found: dict[str, Any] = {}
    for base in bases_of(type(thing)):
        own = class_contents(base).get("__dict__")
        if type(own) is types.GetSetDescriptorType or _is_slot(own):  # Some C classes have a slot.
            found.update(own.__get__(thing))
            break
    for slot in slots_of(type(thing)):
        with suppress(AttributeError):  # The slot is empty.
            found[slot.__name__] = slot.__get__(thing)
    return found


def parts_of(thing: Any, name: str, kinds: Kinds) -> Iterator[Part]:
    """Yield the parts of an object that may hold tensors, each with its name.

    What the garbage collector does not track, such as a string or a dictionary of strings, holds
    none. Asking the collector is much faster than looking at each.
    """
    kind = kinds(thing)
    labelled: list[Iterable[tuple[Any, str]]] = []
    if kind is Kind.MAPPING or is_instance(thing, dict):
        items = _items_of_mapping(thing) if _has_parts(thing) else []
        labelled.append((value, f"[{_shown(key)}]") for key, value in items if is_tracked(value))
        keys = [key for key, _ in items if is_tracked(key)]
        labelled.append((key, ".keys()") for key in keys if kinds(key) in TARGETS)
    elif kind is Kind.ITEMS:
        parts = enumerate(_items_of(thing))
        labelled.append((value, f"[{index}]") for index, value in parts if is_tracked(value))
    if kind not in (Kind.MAPPING, Kind.ITEMS):
        attributes = attributes_of(thing).items()
        labelled.append((value, f".{key}") for key, value in attributes if is_tracked(value))
    for found in labelled:
        for part, label in found:
            if kinds(part) is not Kind.LEAF:
                # Names of deeply nested parts would fill the memory.
                yield part, name + label if len(name) < 200 else name


def _shown(key: Any) -> str:
    return repr(key) if type(key) in _SHOWN_KEYS else f"<{name_of(type(key))}>"


def _has_parts(container: Any) -> bool:
    """Look in one step of C code whether a container holds more than strings and numbers."""
    return any(map(is_tracked, gc.get_referents(container)))


def _items_of_mapping(thing: Any) -> list[tuple[Any, Any]]:
    if not is_instance(thing, dict):
        # The dictionary behind a proxy. Another mapping would run its own code.
        (thing,) = gc.get_referents(thing)
    return list(dict.items(thing)) if is_instance(thing, dict) else []


def _items_of(thing: Any) -> list[Any]:
    for kind in _SEQUENCES:
        if is_instance(thing, kind):
            iterate: Callable[[Any], Iterator[Any]] = kind.__iter__
            return list(iterate(thing)) if _has_parts(thing) else []
    return list(thing)  # A view of a dictionary, which cannot be subclassed.


def entries_of(mapping: Any) -> list[tuple[Any, Any]]:
    """Return the items of a module's registry: of a dictionary, or of torch.jit's mapping."""
    if is_instance(mapping, dict):
        return list(dict.items(mapping))
    if module_of(type(mapping)) == "torch.jit._script":
        return list(mapping.items())  # torch's own, around a C++ object.
    return []
