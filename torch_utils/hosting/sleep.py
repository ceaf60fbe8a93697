"""offload: move a model's values to host memory, and back into the same objects.

Three reference counts decide what moves, as they decide what `release` frees: those of Python's
objects, of torch's tensors and of their storages. A storage moves if the objects that were passed
explain all of its references. What anything else uses stays where it is, so nothing else notices.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

from torch_utils._memory import empty_caches
from torch_utils._release.graph import Graph
from torch_utils._release.objects import (
    MODULE,
    PACKED,
    TENSOR,
    Kinds,
    attributes_of,
    bases_of,
    find_in_class,
    name_of,
    without_overrides,
)
from torch_utils._release.roots import roots_of
from torch_utils._release.storages import Storages, name_of_device
from torch_utils._report import StillHeld
from torch_utils._resource import add_note, takes_precedence
from torch_utils._runtime import DEBUG, import_torch, log, private, reference_counts
from torch_utils._signals import DeferredSignals
from torch_utils.errors import repr_of

__all__ = ["Offloaded", "offload", "synchronize"]

STAYING = {"cpu", "meta"}
"""Types of devices whose tensors stay. Without "cpu", host memory is a device, as in rehearsals."""

_NAMES = ("_C._swap_tensor_impl", "_C._storage_Use_Count", "Tensor._use_count")
_OBSTACLES = {"ScriptModule", "ScriptFunction", "CUDAGraph", "OptimizedModule"}
_OF_COMPILED = ("_compiled_call_impl", "_torchdynamo_orig_callable")  # attributes


class Offloaded:
    """What `offload` moved to host memory, and the way back.

    As a context manager, it restores at the end of the block. Threads: safe.

    Attributes:
        nbytes: The bytes that were moved, by device.
        host_bytes: What they take on the host. torch rounds each block of pinned memory up to a
            power of two.
        left: What stayed on a device, because something else refers to it.
    """

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self.host_bytes: int = 0
        self.left: tuple[StillHeld, ...] = ()
        # Tensors, their storages in host memory, and the devices where they belong. A tensor has
        # another storage if the program moved it meanwhile.
        self._moved: list[tuple[ref[Any], int, Any]] = []
        self._lock = threading.Lock()

    def restore(self) -> bool:
        """Move everything back to its device, into the same objects.

        A tensor that the program itself has moved since stays where it is.

        Returns:
            True if this call restored it.

        Raises:
            RuntimeError: The device has too little memory, or cannot be used. All values are still
                in host memory; call this again.
        """
        with self._lock:
            if not self._moved:
                return False
            torch: Any = import_torch()
            with without_overrides(torch):
                groups: defaultdict[tuple[int, Any], list[Any]] = defaultdict(list)
                for find, key, device in self._moved:
                    tensor = find()
                    if tensor is not None and _key_of(torch, tensor) == key:
                        groups[key, device].append(tensor)
                _move(torch, list(groups.values()), [device for _, device in groups])
            self._moved = []
            return True

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        try:
            self.restore()
        except BaseException as error:
            if exc is None or takes_precedence(error, exc):
                raise
            # The exception of the block is the one that matters.
            add_note(exc, f"restoring what was offloaded also failed: {repr_of(error)}")


def offload(*objects: Any) -> Offloaded:
    """Move the tensors of objects from their devices to host memory, until they are restored.

    ::

        with offload(model):  # the memory of the GPU is free in this block
            run_something_else()

    Parameters, buffers, gradients and tensors in attributes, containers and inner objects are
    moved, each storage once, to pinned memory as long as there is some. The objects stay the same:
    so do ties, views, strides, dtypes and hooks. Do not use them meanwhile in another thread.

    What anything else refers to, such as a layer of another model or in a variable, stays on its
    device and is listed in `Offloaded.left`. So pass an optimizer together with its model.

    Args:
        *objects: Models, optimizers, tensors and other objects with attributes, or containers of
            them.

    Returns:
        What was moved. Call its ``restore()``, or use it in a ``with`` block.

    Raises:
        TypeError: An object cannot be moved: TorchScript, CUDA graphs, compiled code, packed or
            sparse tensors, or what `release` refuses. Nothing was changed.
        RuntimeError: There is too little host memory, or torch cannot exchange one of the tensors.
            Nothing was changed.
    """
    offloaded = Offloaded()
    torch: Any = import_torch()
    if torch is None:
        return offloaded
    with without_overrides(torch):
        finder = _Finder(torch, objects)
        groups = finder.groups()
        if finder.has_unknown:  # Garbage may refer to it.
            groups.clear()
            del finder
            gc.collect()
            finder = _Finder(torch, objects)
            groups = finder.groups()
        devices = [torch.Tensor.device.__get__(group[0]) for group in groups]
        _move(torch, groups, [None] * len(groups))
        for group, device in zip(groups, devices, strict=True):
            storage = torch.Tensor.untyped_storage(group[0])
            nbytes, name = storage.nbytes(), name_of_device(device)
            rounded = 1 << (nbytes - 1).bit_length()
            offloaded.host_bytes += rounded if storage.is_pinned() else nbytes
            offloaded.nbytes[name] = offloaded.nbytes.get(name, 0) + nbytes
            offloaded._moved += [(ref(one), storage._cdata, device) for one in group]
        offloaded.left = finder.left()
    if groups:
        empty_caches()
    return offloaded


class _Finder:
    """Finds the tensors of objects that may be moved. Changes nothing.

    Args:
        torch: The module.
        objects: The objects.

    Attributes:
        has_unknown: Whether something unknown refers to a tensor, which therefore stays.
    """

    def __init__(self, torch: Any, objects: tuple[Any, ...]) -> None:
        self.has_unknown = False
        self._torch = torch
        for name in _NAMES:
            if private(torch, name) is None:
                raise _refused("anything", f"torch {torch.__version__} lacks torch.{name}")
        kinds = Kinds()
        roots = roots_of(objects, kinds, "offload()")
        self._passed = {id(root.thing) for root in roots}
        self._graph = graph = Graph(roots, kinds)
        self._storages = Storages()
        self._storages.add(graph, kinds)
        tensors = [n for n in graph.memory if kinds.of(type(graph.nodes[n])) == TENSOR]
        # Torch refers to a tensor while C++ uses it elsewhere, which is counted apart.
        uses = {n: 1 for n in tensors if torch.Tensor._use_count(graph.nodes[n]) > 1}
        self._stays = graph.users(uses)
        for number, thing in enumerate(graph.nodes):
            if self._is_own(number) and (reason := _obstacle(thing, kinds.of(type(thing)))):
                raise _refused(graph.name_of(number), reason)
        self._tensors: dict[int, Any] = {}  # by their ids
        self._inner: dict[int, int] = {}  # references that were met, by the ids of tensors
        for number in tensors:
            tensor = graph.nodes[number]
            if number not in graph.unexpected and self._is_own(number) and self._has_memory(tensor):
                if problem := _problem(torch, tensor):
                    raise _refused(graph.name_of(number), problem)
                self._tensors[id(tensor)] = tensor
                self._inner[id(tensor)] = graph.inner[number]

    def _is_own(self, number: int) -> bool:
        """Return whether a part is not behind one that stays whole."""
        return self._stays.get(number, number) == number

    def _has_memory(self, tensor: Any) -> bool:
        """Return whether a tensor has memory of its own on a device; wrappers have none."""
        if self._torch.Tensor.device.__get__(tensor).type in STAYING:
            return False
        try:
            return bool(self._torch.Tensor.untyped_storage(tensor).data_ptr())
        except (RuntimeError, NotImplementedError):  # `_problem` tells a sparse tensor.
            return bool(self._torch.Tensor.layout.__get__(tensor) != self._torch.strided)

    def groups(self) -> list[list[Any]]:
        """Return the tensors that may move, by storage."""
        torch, base, tensors = self._torch, self._torch.Tensor, self._tensors
        uses = Counter[int]()  # by bases and gradients, in C++
        for tensor in list(tensors.values()):
            for other in (base._base.__get__(tensor), _gradient(torch, tensor)):
                if other is not None:
                    uses[id(other)] += 1
                    tensors[id(other)] = other
        tensor = other = None
        groups: defaultdict[int, list[Any]] = defaultdict(list)
        staying: set[int] = set()
        gradients = [(one, _gradient(torch, one)) for one in tensors.values()]
        pairs = [{_key_of(torch, one), _key_of(torch, g)} for one, g in gradients if g is not None]
        gradients.clear()
        counts = reference_counts(list(tensors.values()))
        for (one, tensor), count in zip(tensors.items(), counts, strict=True):
            key, in_use = _key_of(torch, tensor), base._use_count(tensor)
            groups[key].append(tensor)
            # The dictionary and the graph refer to it, and torch while C++ uses it elsewhere.
            known = 1 + (in_use > 1) + (one in self._inner) + self._inner.get(one, 0)
            is_explained = count <= known or one in self._passed
            if not is_explained or in_use > 1 + uses[one] or not base.is_leaf.__get__(tensor):
                staying.add(key)
        count_uses: Any = private(torch, "_C._storage_Use_Count")
        for key, group in groups.items():
            storage = base.untyped_storage(group[0])  # It counts as well.
            if count_uses(storage._cdata) > len(group) + 1:
                staying.add(key)
            storage = None
        self.has_unknown = bool(staying)
        # A tensor and its gradient are on the same device.
        while more := {key for pair in pairs if pair & staying for key in pair} - staying:
            staying |= more
        return [group for key, group in groups.items() if key not in staying]

    def left(self) -> tuple[StillHeld, ...]:
        """Return what still exists on a device."""
        held: Counter[tuple[str, str]] = Counter()
        for one in self._storages.alive():
            if one.device != "host" or "cpu" not in STAYING:
                name = one.what if one.part is None else one.part.name
                held[name, one.device] += one.nbytes
        return tuple(StillHeld(name, n, device, ()) for (name, device), n in held.items())


def _obstacle(thing: Any, kind: int) -> str:
    """Return why an object cannot be moved, or an empty string."""
    names = {name_of(base) for base in bases_of(type(thing))}
    contents = attributes_of(thing) if kind == MODULE else {}
    if names & _OBSTACLES or any(map(contents.get, _OF_COMPILED)):
        return "TorchScript, CUDA graphs and compiled code have addresses or copies of tensors"
    return "its weights are packed" if kind == PACKED else ""


def _refused(name: str, reason: str) -> TypeError:
    return TypeError(f"offload() cannot move {name}, because {reason}. Nothing was changed.")


def _key_of(torch: Any, tensor: Any) -> Any:
    return torch.Tensor.untyped_storage(tensor)._cdata


def _gradient(torch: Any, tensor: Any) -> Any:
    base = torch.Tensor
    return base.grad.__get__(tensor) if base.is_leaf.__get__(tensor) else None


def _problem(torch: Any, tensor: Any) -> str:
    """Return why a tensor cannot be made again around another storage, or an empty string."""
    base = torch.Tensor
    is_strided = base.layout.__get__(tensor) == torch.strided and not base.is_nested.__get__(tensor)
    is_lazy = is_strided and (base.is_conj(tensor) or base.is_neg(tensor))
    if not is_strided or is_lazy or base.is_quantized.__get__(tensor):
        return "it is a sparse, packed, nested, quantized or conjugated tensor"
    dispatch = find_in_class(type(tensor), "__torch_dispatch__")
    if dispatch is not None and dispatch is not find_in_class(base, "__torch_dispatch__"):
        return f"its class {name_of(type(tensor))} has a dispatch of its own"
    return ""


def synchronize(torch: Any, devices: Iterable[Any]) -> None:
    """Wait until devices have done what all their streams were given."""
    for device in {one for one in devices if one.type not in STAYING}:
        module = getattr(torch, device.type)
        module.synchronize(*() if device.type == "mps" else (device,))


def _move(torch: Any, groups: list[list[Any]], devices: list[Any]) -> None:
    """Copy storages and exchange those of the tensors; change nothing if that fails.

    Args:
        torch: The module.
        groups: Tensors by storage.
        devices: The target of each group; None for the host.
    """
    base, swap = torch.Tensor, private(torch, "_C._swap_tensor_impl")
    assert swap is not None  # `_Finder` has checked it.
    old = [base.untyped_storage(group[0]) for group in groups]
    new: list[Any] = []
    done: list[tuple[Any, Any]] = []
    gradients = [(t, _gradient(torch, t)) for group in groups for t in group]
    with DeferredSignals(), torch.inference_mode(False), torch.no_grad():
        try:
            _allocate(torch, old, devices, new)  # First all of it: memory may run out.
            on_devices = [storage.device for storage in (*old, *new)]
            synchronize(torch, on_devices)
            for source, target in zip(old, new, strict=True):
                target.copy_(source, non_blocking=True)
            for group, storage in zip(groups, new, strict=True):  # While the copies run.
                for tensor in group:
                    other = _tensor_like(torch, tensor, storage)
                    swap(tensor, other)
                    done.append((tensor, other))
            synchronize(torch, on_devices)
        except BaseException:  # For example, functorch refers to a tensor weakly.
            for tensor, other in done:
                swap(tensor, other)
            new.clear()  # The exception keeps this frame.
            done.clear()
            raise
        for tensor, _ in done:  # The hooks are the object's, but the new tensor does not know.
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(base, name).__get__(tensor)
                if hooks is not None:
                    getattr(base, name).__set__(tensor, hooks)
        for tensor, gradient in gradients:
            # The program may have moved one of them meanwhile.
            if gradient is not None and tensor.device == gradient.device:
                base.grad.__set__(tensor, gradient)


def _allocate(torch: Any, old: list[Any], devices: list[Any], new: list[Any]) -> None:
    """Append new storages on devices, or on the host for None, pinned as long as that succeeds."""
    pins = True
    for storage, device in zip(old, devices, strict=True):
        nbytes, make = storage.nbytes(), partial(torch.empty, dtype=torch.uint8)
        if device is None and pins:
            try:
                new.append(make(nbytes, device="cpu", pin_memory=True).untyped_storage())
                continue
            except RuntimeError as error:  # No accelerator, or the system locks no more pages.
                log(DEBUG, "%d bytes are not pinned: %r", nbytes, error)
                pins = False
        new.append(make(nbytes, device=device or "cpu").untyped_storage())


def _tensor_like(torch: Any, tensor: Any, storage: Any) -> Any:
    """Return a tensor like another one, with the memory of a storage."""
    base = torch.Tensor
    with torch.inference_mode() if base.is_inference(tensor) else nullcontext():
        made = torch.empty(0, dtype=base.dtype.__get__(tensor), device=storage.device)
        made.set_(storage, base.storage_offset(tensor), base.size(tensor), base.stride(tensor))
        return made.requires_grad_(base.requires_grad.__get__(tensor))
