"""Of what kind an object is, found out from its class alone.

None of the program's code runs: no ``__class__``, no ``__getattr__``, no property, no metaclass,
no `__subclasshook__`. Only what C keeps of a class is read: its bases and their dictionaries.
"""

from __future__ import annotations

import sys
from collections import deque
from enum import Enum, auto
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch_utils._releasing.classes import (
    bases_of,
    contents_of_class,
    is_among,
    name_of,
    package_of,
)
from torch_utils._releasing.faiss_indexes import is_index_class
from torch_utils.resource import Resource


class Kind(Enum):
    """What `release` does with an object."""

    LEAF = auto()  # Holds nothing: passed over in a container, refused by itself.
    HARMLESS = auto()  # The same, but goes with a model, and may be named beside it.
    ARRAY = auto()  # numpy's: a leaf, or a container of objects.
    MODULE = auto()
    TENSOR = auto()
    TRAINING = auto()  # Refers to what others own: buried.
    INDEX = auto()
    CLOSABLE = auto()
    RESOURCE = auto()
    MAPPING = auto()
    ITEMS = auto()
    ONCE = auto()  # Iterators, generators, coroutines.
    AWAITED = auto()  # Closes by a coroutine function.
    STORAGE = auto()
    RECORD = auto()  # A container whose items are its attributes: a dataclass, a namespace.
    LIBRARY = auto()  # An object of a known library, and of its parts.
    DATASET = auto()
    OPAQUE = auto()  # Any other.


TARGETS = frozenset((Kind.MODULE, Kind.TENSOR, Kind.TRAINING, Kind.INDEX, Kind.RESOURCE))

LIBRARIES = frozenset(
    (
        *("torch", "transformers", "tokenizers", "sentence_transformers", "accelerate"),
        *("diffusers", "peft", "safetensors", "huggingface_hub"),
    )
)
_BY_NAME = {
    ("torch", "Optimizer"): Kind.TRAINING,
    ("torch", "LRScheduler"): Kind.TRAINING,
    ("torch", "GradScaler"): Kind.TRAINING,
    ("torch", "DataLoader"): Kind.TRAINING,
    ("accelerate", "AcceleratedScheduler"): Kind.TRAINING,
    ("torch", "UntypedStorage"): Kind.STORAGE,
    ("torch", "TypedStorage"): Kind.STORAGE,
    ("torch", "Dataset"): Kind.DATASET,
    ("numpy", "ndarray"): Kind.ARRAY,
    # What goes with a model. Vocabularies are large, and hold no tensor.
    ("tokenizers", "Tokenizer"): Kind.HARMLESS,
    ("transformers", "PreTrainedTokenizerBase"): Kind.HARMLESS,
    ("transformers", "PreTrainedConfig"): Kind.HARMLESS,
    ("transformers", "PretrainedConfig"): Kind.HARMLESS,
    ("transformers", "GenerationConfig"): Kind.HARMLESS,
    ("transformers", "ProcessorMixin"): Kind.HARMLESS,
}
_DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# By their ids; see classes.py.
_ONCE = frozenset(map(id, (GeneratorType, CoroutineType, AsyncGeneratorType)))
_MAPPINGS = frozenset(map(id, (dict, MappingProxyType)))
_ITEMS = frozenset(map(id, (list, tuple, set, frozenset, deque, *_DICT_VIEWS)))
_LEAVES = frozenset(
    map(
        id,
        (
            *(bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice, type),
            *(type(None), type(Ellipsis), type(NotImplemented), BaseException, ModuleType),
            *(FunctionType, BuiltinFunctionType, MethodType, CodeType),
            *(property, staticmethod, classmethod),
        ),
    )
)
# Their classes, and those that the program derives from them, are values.
_VALUES = frozenset(
    (
        *("datetime", "decimal", "fractions", "uuid", "pathlib", "enum", "ipaddress"),
        *("zoneinfo", "random", "logging"),
    )
)
# Values of exactly these modules' classes; a program's class may derive from their bases.
_OWN_VALUES = frozenset(
    (
        *("_thread", "threading", "weakref", "_weakref", "functools", "operator", "typing", "re"),
        *("inspect", "contextvars", "_contextvars", "_random", "numpy", "string", "itertools"),
        *("array", "pandas", "pyarrow", "scipy"),  # Like numpy's: nothing comes back in place.
    )
)
_RECORD_MARKS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__")
_RECORD_MODULES = frozenset(("collections", "argparse", "types"))
_AWAITABLE_FLAGS = 0x80 | 0x200  # inspect's CO_COROUTINE and CO_ASYNC_GENERATOR


def find(kind: type, name: str) -> Any:
    """Return what a class has under a name, unbound; None where there is nothing."""
    for base in bases_of(kind):
        contents = contents_of_class(base)
        if name in contents:
            return contents[name]
    return None


def is_function(value: Any) -> bool:
    """Say whether a class's attribute is a method of some sort."""
    return type(value) in (staticmethod, classmethod) or callable(value)


def is_awaitable(function: Any) -> bool:
    """Say whether a function is a coroutine function."""
    function = getattr(function, "__func__", function)
    code = function.__code__ if type(function) is FunctionType else None
    return code is not None and bool(code.co_flags & _AWAITABLE_FLAGS)


def kind_of(kind: type, torch: Any) -> Kind:
    """Say of what kind the instances of a class are; ``torch`` is None if it is not loaded."""
    bases = bases_of(kind)
    if torch is not None:
        if is_among(torch.nn.Module, bases):
            return Kind.MODULE
        if is_among(torch.Tensor, bases):
            return Kind.TENSOR
    if is_index_class(bases):
        return Kind.INDEX
    if is_among(Resource, bases):
        return Kind.RESOURCE
    ids = set(map(id, bases))
    if not ids.isdisjoint(_ONCE):
        return Kind.ONCE
    names = [(package_of(base), name_of(base)) for base in bases]
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    close = find(kind, "close")
    if close is not None and is_function(close):
        return Kind.AWAITED if is_awaitable(close) else Kind.CLOSABLE
    return _kind_of_others(kind, bases, ids, {origin for origin, _ in names})


def _kind_of_others(kind: type, bases: tuple[type, ...], ids: set[int], origins: set[str]) -> Kind:
    if not ids.isdisjoint(_MAPPINGS):
        return Kind.MAPPING
    if not ids.isdisjoint(_ITEMS):
        return Kind.ITEMS
    if not ids.isdisjoint(_LEAVES) or not _VALUES.isdisjoint(origins):
        return Kind.LEAF
    if find(kind, "__next__") is not None:
        return Kind.ONCE
    if any(mark in contents_of_class(base) for base in bases for mark in _RECORD_MARKS):
        return Kind.RECORD
    if not _RECORD_MODULES.isdisjoint(origins):
        return Kind.RECORD
    if package_of(kind) in _OWN_VALUES:
        return Kind.LEAF
    if not LIBRARIES.isdisjoint(origins):
        return Kind.LIBRARY
    return Kind.OPAQUE


def is_standard_stream(thing: Any) -> bool:
    """Say whether a file is one of those that the whole program writes to."""
    names = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    return any(thing is getattr(sys, name, None) for name in names)
