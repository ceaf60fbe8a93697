"""What a frozen heap would keep from running, and the proof that there is nothing of it.

A module's functions and its namespace refer to each other, so most of what a program holds is
given up only by the garbage collections of the teardown. `fast_exit` leaves those nothing to
do; so it asks first whether any object wants to be told of its end.

Every object that garbage collection knows is asked, wherever it is held: in a module, a
closure, a thread's variables, a context. Only its type, and for the few types that matter its
state, is read, in ways that run none of the program's code. What is not understood counts as
wanting to be told.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from itertools import compress
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

# Read through these, no metaclass and no `__getattribute__` of the program's has a say.
_contents = type.__dict__["__dict__"].__get__
_flags = type.__dict__["__flags__"].__get__
_module_name = type.__dict__["__module__"].__get__
_callback = weakref.ref.__dict__["__callback__"].__get__

_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_IN_MEMORY = (io.BytesIO, io.StringIO)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_AWAITED = (CoroutineType, AsyncGeneratorType)
_IO_BASE: Any = io.IOBase.__base__  # The class in C, which has no say in `issubclass`.
_ROOTS = (_IO_BASE, weakref.ref, *_PROXIES, *_AWAITED, GeneratorType)
"""Types whose instances are judged one by one: some of them have something to do at their end."""

_ENDINGS = ("__del__", "close", "flush", "release", "finish")
_BEGINNINGS = ("write", "put", "append")
"""Methods of types written in C: what has these may have something left to write."""

_SYSTEM_GIVES_BACK = frozenset(
    {"_thread", "_multiprocessing", "_socket", "mmap", "select", "posix", "nt"}
)
_PLAIN_DATA = frozenset({"zlib", "_bz2", "_lzma", "_hashlib", "numpy"})
_HARMLESS_BUILTINS = frozenset({"memoryview", "stderrprinter"})

_REMOVERS = frozenset(
    {
        ("weakref", "remove"),
        ("_weakrefset", "_remove"),
        ("logging", "_removeHandlerRef"),
    }
)
"""The standard library's callbacks that take an entry out of a weak container, and do no more."""

_TRACKED = 1 << 14  # Py_TPFLAGS_HAVE_GC
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_INSTALLED = frozenset({"site-packages", "dist-packages"})


class Survey:
    """The objects whose end may run something, and the judgement on them.

    `look` may be called again, after a `gc.freeze`: it then adds what is new. Only while no other
    thread runs: among all objects are tuples that are just being made, and a reference to one of
    these makes its maker's ``tuple(...)`` a SystemError. Nor could a file be flushed then that
    another thread is busy with.
    """

    def __init__(self) -> None:
        self._suspects: list[Any] = []

    def look(self) -> None:
        """Find the objects to judge among all that are alive, and not frozen."""
        objects = gc.get_objects()
        kinds = _types_with_an_end()
        wanted = set(map(id, kinds))
        self._suspects += _instances(objects, wanted)
        if any(map(_is_blind, kinds)):
            # Their instances are unknown to garbage collection: look at what the others hold.
            held = gc.get_referents(*objects)
            while held:
                self._suspects += _instances(held, wanted)
                held = gc.get_referents(*(one for one in held if _is_untracked_container(one)))

    def is_quiet(self) -> bool:
        """Whether the end of all of them runs nothing and writes nothing but plain files."""
        return all(map(_is_quiet, self._suspects))

    def flush(self) -> bool:
        """Write what the plain files hold, as their destructors would; say if all could."""
        try:
            for file in self._open_files():
                file.flush()
        except (OSError, ValueError):
            return False  # A broken pipe, a full disk: the ordinary exit says so.
        return True

    def _open_files(self) -> Iterator[Any]:
        standard = {id(part) for file in _standard_streams() for part in _layers(file)}
        for file in self._suspects:
            if (
                _is_any(type(file), _FILES)
                and id(file) not in standard
                and _layers(file)
                and not file.closed
                and file.writable()
            ):
                yield file


def _instances(objects: list[Any], wanted: set[int]) -> Iterator[Any]:
    """Choose the objects of the types with these ids.

    By id, for a metaclass may define what equal means; and in C, for there are many.
    """
    return compress(objects, map(wanted.__contains__, map(id, map(type, objects))))


def _types_with_an_end() -> list[type]:
    """List all types whose instances may want to be told of their end, subclasses included."""
    ends = [*_ROOTS, *filter(_defines_an_end, _with_subclasses([object]))]
    return _with_subclasses(ends)


def _with_subclasses(kinds: list[type]) -> list[type]:
    pending, found = list(kinds), {}
    while pending:
        kind = pending.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            pending += type.__subclasses__(kind)
    return list(found.values())


def _defines_an_end(kind: type) -> bool:
    """Whether a class itself has a destructor, or in C a method that finishes something."""
    contents = _contents(kind)
    for name in _ENDINGS:
        if name not in contents:
            continue
        method = contents[name]
        if type(method) is FunctionType:
            if name == "__del__" and not _is_ours(method):
                return True
            continue
        if name == "__del__" and type(method) is not WrapperDescriptorType:
            return True
        if callable(method) and not _is_harmless(kind):
            return True
    return False


def _is_ours(function: FunctionType) -> bool:
    """Whether a destructor is this package's: what it does has been done already."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch_utils"


def _is_harmless(kind: type) -> bool:
    """Whether a type in C is known: the end of the process does what its destructor does."""
    module = _module_name(kind)
    return module in _SYSTEM_GIVES_BACK | _PLAIN_DATA or (
        module == "builtins" and kind.__name__ in _HARMLESS_BUILTINS
    )


def _is_blind(kind: type) -> bool:
    """Whether garbage collection knows none of its instances, and these may write something."""
    if _flags(kind) & _TRACKED:
        return False
    mro = type.__dict__["__mro__"].__get__(kind)
    return any(name.startswith(_BEGINNINGS) for base in mro for name in _contents(base))


def _is_untracked_container(thing: Any) -> bool:
    return _is_any(type(thing), (tuple, dict)) and not gc.is_tracked(thing)


def _is_any(kind: type, kinds: Iterable[Any]) -> bool:
    return any(kind is one for one in kinds)


def _is_quiet(thing: Any) -> bool:
    """Whether the end of one suspect runs nothing that matters."""
    kind = type(thing)
    if kind is GeneratorType:
        return not _is_started(thing)
    if kind is CoroutineType:
        return thing.cr_frame is None
    if kind is AsyncGeneratorType:
        return thing.ag_frame is None
    if _is_any(kind, _PROXIES):
        return all(map(_only_removes, gc.get_referents(thing)))
    if issubclass(kind, weakref.ref):
        callback = _callback(thing)
        return callback is None or _only_removes(callback)
    if issubclass(kind, _IO_BASE):
        return _is_any(kind, _IN_MEMORY) or bool(_is_any(kind, _FILES) and _layers(thing))
    return _is_idle(thing)


def _is_started(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Whether it has begun and not ended; only such a one has a ``finally`` to run."""
    if generator.gi_frame is None:
        return False
    if sys.version_info >= (3, 11):
        return generator.gi_running or generator.gi_suspended
    return generator.gi_frame.f_lasti != -1


def _only_removes(callback: Any) -> bool:
    """Whether a weak reference's callback is one that only tidies a container."""
    kind = type(callback)
    if kind is weakref.finalize:
        return True  # Its own atexit callback runs it, or it is never run.
    if kind is FunctionType:
        return (callback.__globals__.get("__name__"), callback.__code__.co_name) in _REMOVERS
    if kind is not BuiltinFunctionType:
        return bool(_module_name(kind) == "_ctypes")  # The one that forgets an array type.
    # Those of abc and of thread-locals (3.13: of a tuple); pybind11's, for types it has made.
    owner = type(callback.__self__)
    return _is_any(owner, (weakref.ref, tuple)) or owner.__name__.startswith(
        ("PyCapsule", "pybind11_detail_")
    )


def _layers(file: Any) -> list[Any]:
    """List a file and what it writes to, if all of it is the standard library's; else nothing."""
    layers = [file]
    try:
        while not _is_any(type(file), (io.FileIO, io.BytesIO)):
            if not _is_any(type(file), _FILES):
                return []
            file = file.buffer if type(file) is io.TextIOWrapper else file.raw
            layers.append(file)
    except (AttributeError, ValueError):
        return []  # Detached, or half built.
    return layers


def _standard_streams() -> list[Any]:
    """List the streams that the interpreter flushes itself."""
    names = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    return [vars(sys).get(name) for name in names]


def _is_idle(thing: Any) -> bool:
    """Whether it is a single object that an installed package keeps and has not used yet.

    joblib keeps one to talk to a process that it would start. There is nothing in it.
    """
    module = sys.modules.get(str(_module_name(type(thing))))
    return (
        type(module) is ModuleType
        and _is_installed(module)
        and any(thing is value for value in list(vars(module).values()))
        and _is_empty(thing)
    )


def _is_empty(value: Any, depth: int = 3) -> bool:
    """Whether nothing has been put into it: None, a bool, 0, a lock, or made of nothing else."""
    kind = type(value)
    if value is None or kind is bool or _module_name(kind) == "_thread":
        return True
    if not gc.is_tracked(value):
        return _is_any(kind, (int, tuple, dict)) and not value
    if not depth or _is_any(kind, (FunctionType, ModuleType)):
        return False
    # Attributes may be stored without a dictionary: the references have the values either way.
    held = gc.get_referents(value)
    return all(_is_empty(part, depth - 1) for part in held if part is not kind)


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is the standard library's or an installed package's, and not the program's.

    A folder of packages that is named in any other way counts as the program's own.
    """
    file = vars(module).get("__file__")
    if type(file) is not str:
        return False
    folders = file.split(os.sep)  # noqa: PTH206  (no import of pathlib)
    return file.startswith(_STANDARD_LIBRARY) or not _INSTALLED.isdisjoint(folders)
