"""Empty tensors in place.

A method of a tensor (``tensor.sort()``, ``tensor + 1``) works without the GIL on a C++ tensor that
it borrows from the Python object. If another thread may be running such a method, the C++ tensor
is kept until that thread has moved on. Functions (``torch.sort(tensor)``) own a reference.
"""

from __future__ import annotations

import gc
import sys
import time
from _thread import get_ident
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

from torch_utils._runtime import DEBUG, early_bound, loaded_torch, log, whole_torch
from torch_utils.releasing.internals import private
from torch_utils.releasing.objects import contents_of, current_frames, slots_of
from torch_utils.releasing.storages import Inventory, Target, is_plain


class TensorTarget(Target):
    """A tensor, which has no elements after its release.

    Attributes:
        references: The number of known references to it, from objects that the program passed.
        is_spared: Whether it is a parameter of a live model and stays intact.
    """

    def __init__(self, thing: Any, name: str, references: int = 0) -> None:
        super().__init__(thing, name)
        self.references = references
        self.is_spared = False

    def count(self, inventory: Inventory) -> None:
        inventory.add(self.name, self.thing)

    def give_up(self, place: str) -> None:
        """Empty it. Call this inside `without_overrides`."""
        if not self.is_spared:
            self._swap_for_an_empty_one()

    def _swap_for_an_empty_one(self) -> int:
        """Replace the object's C++ tensor by an empty one, and clear its attributes.

        The new C++ tensor has the same class, dtype and device, and the shape (0,). The old one
        stays intact for its other users: views, arrays, DLPack capsules, autograd graphs,
        collectives, and functions in other threads. Changing ``data`` or calling `Tensor.set_`
        would change it for them as well.

        Outputs of compiled code's CUDA graphs stay as they are: torch returns the same object
        again, and cannot swap it.

        Returns:
            The number of references to the object.

        Raises:
            RuntimeError: This torch cannot swap tensors. The tensor stays intact.
        """
        torch: Any = loaded_torch()
        swap, is_cached = _swapping(torch)
        if swap is None:
            raise RuntimeError(
                f"torch {torch.__version__} cannot empty a tensor in place, so it was left whole; "
                "delete the variables that refer to it instead"
            )
        if is_cached is not None and is_cached(self.thing):
            return 0
        base = torch.Tensor
        if base.is_leaf.__get__(self.thing):
            base.grad.__set__(self.thing, None)
        other = _nothing_like(torch, self.thing)
        swap(self.thing, other)
        # A thread that is running a method of it has a reference as well. A method that starts
        # from here on sees an empty tensor.
        count = sys.getrefcount(self.thing)
        if self.references >= 0 and count > _references_of_a_target() + self.references:
            keep_while_in_use(other)
        base._backward_hooks.__set__(self.thing, None)
        contents_of(self.thing).clear()
        for slot in () if is_plain(torch, self.thing) else slots_of(type(self.thing)):
            try:
                slot.__delete__(self.thing)
            except (AttributeError, TypeError):
                continue  # The slot is empty, or a read-only field of a C class.
        return count


@lru_cache(maxsize=1)
def _swapping(torch: Any) -> tuple[Any, Any]:
    return private(torch, "_C._swap_tensor_impl"), private(torch, "_C._is_cached_tensor")


@lru_cache(maxsize=1)
def _references_of_a_target() -> int:
    """Return the reference count of a tensor that only a target holds; Pythons differ."""
    torch: Any = whole_torch()
    return TensorTarget(torch.empty(0, device="cpu"), "", -1)._swap_for_an_empty_one()


def _nothing_like(torch: Any, tensor: Any) -> Any:
    base = torch.Tensor
    dtype, device = base.dtype.__get__(tensor), base.device.__get__(tensor)
    needs_gradient = base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor)
    if base.is_quantized.__get__(tensor):
        return torch._empty_affine_quantized(
            (0,), scale=1.0, zero_point=0, dtype=dtype, device=device
        )
    if base.is_inference(tensor) != torch.is_inference_mode_enabled():
        with torch.inference_mode(base.is_inference(tensor)):
            return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)
    return torch.empty((0,), dtype=dtype, device=device, requires_grad=needs_gradient)


# Tensors that another thread may be using

WAIT_S = 0.02
Place = tuple[int, int, int]  # a thread, the id of a frame, and its current instruction

# A thread with one of these as its innermost function uses no tensor, and may wait forever.
_WAITING = {
    *(("threading", "wait"), ("threading", "_wait_for_tstate_lock"), ("threading", "join")),
    *(("torch_utils.hosting.host", "_expire"), ("torch_utils.hosting.host", "wait")),
    *(("torch_utils.hosting.messages", "_read"), ("torch_utils.hosting.messages", "send")),
    *(("torch_utils.prometheus", "_run"), ("logging.handlers", "dequeue")),
    *(("queue", "get"), ("subprocess", "_try_wait"), ("execnet.gateway_base", "read")),
    *(("concurrent.futures.thread", "_worker"), ("selectors", "select")),
    *(("multiprocessing.connection", "_recv"), ("socket", "accept"), ("socket", "readinto")),
}
# The methods of a tensor that call a function of the program while they work.
_CALLING_BACK = frozenset(("apply_", "map_", "map2_"))
_KEPT: dict[int, tuple[Any, set[Place]]] = {}  # by the id of the set


def keep_while_in_use(taken_out: Any) -> None:
    """Keep a C++ tensor while other threads may be using it.

    A later garbage collection of any generation, or a later release, frees it.
    """
    places = {place for place, is_inside in _places(current_frames) if is_inside}
    if places:
        _KEPT[id(places)] = taken_out, places
        if _after_collection not in gc.callbacks:
            gc.callbacks.append(_after_collection)


def is_any_kept() -> bool:
    """Return whether a tensor is kept for a thread that may still use it."""
    return bool(_KEPT)


def free_unused_tensors(wait_s: float = WAIT_S) -> None:
    """Free tensors that no thread can still be using, and wait briefly for the others."""
    stop = time.perf_counter() + wait_s
    while _KEPT:
        _drop_unused(current_frames)
        if not _KEPT or time.perf_counter() >= stop:
            return
        time.sleep(0.001)


def _places(look: Callable[[], dict[int, FrameType]]) -> Iterator[tuple[Place, bool]]:
    """Yield the place of each frame, and whether it may be running a method of a tensor."""
    me = get_ident()
    for thread, frame in look().items():
        inner = ""  # A list of frames would keep this thread's variables alive.
        while frame is not None:
            name = frame.f_code.co_name
            if inner or thread == me:
                is_inside = inner == "__torch_dispatch__"
            else:
                is_inside = (frame.f_globals.get("__name__"), name) not in _WAITING
            is_inside = is_inside or not _CALLING_BACK.isdisjoint(frame.f_code.co_names)
            yield (thread, id(frame), frame.f_lasti), is_inside
            inner, frame = name, frame.f_back  # type: ignore[assignment]  # (None at the end)


def _drop_unused(look: Callable[[], dict[int, FrameType]]) -> None:
    now = {place for place, _ in _places(look)}
    for key in list(_KEPT):  # Tuples of items could set off a collection, which changes it.
        _, places = _KEPT.get(key, (None, set()))
        places.intersection_update(now)  # Later calls see an empty tensor.
        if not places:
            _KEPT.pop(key, None)


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        _drop_unused(sys._current_frames)  # No collection begins in the middle of this one.
        if not _KEPT and _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)


@early_bound
def safe_tensor_cleanup(tensor_attr_name: str, obj: Any) -> bool:
    """Set the attribute ``obj.<tensor_attr_name>`` to None, to drop the tensors that it holds.

    Works for plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers. The attribute may hold a tensor or a list, tuple or dictionary of
    tensors. It is meant for destructors: it never raises, imports nothing and initialises no
    device. It is as thread-safe as setting an attribute.

    Other references keep the tensor's memory alive. To free it nevertheless, use `release`.

    Args:
        tensor_attr_name: The name of the attribute.
        obj: Its owner. It may be None or half built.

    Returns:
        True if the attribute held something and was cleared. False if it was missing or None, or
        if the owner refused the change and is unchanged.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner or a validating __setattr__ may raise
            # anything. A deleter may still work.
            log(DEBUG, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this for owners that may be half built or torn down.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False
