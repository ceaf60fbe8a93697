"""Tensors: counted with their gradients, and emptied in place.

A method of a tensor (``tensor.sort()``, ``tensor + 1``) works without the GIL on a C++ tensor that
it only borrows from the Python object. So what is taken out of an object while another thread may
be inside of it is kept until that thread has moved on. Functions (``torch.sort(tensor)``) hold a
share of their own.
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
    """A tensor: the same object afterwards, of no elements.

    Attributes:
        references: How many of the references to it are known: those of what the program named.
        is_spared: Whether it is the parameter of a live model, and stays as it is.
    """

    def __init__(self, thing: Any, name: str, references: int = 0) -> None:
        super().__init__(thing, name)
        self.references = references
        self.is_spared = False

    def count(self, inventory: Inventory) -> None:
        inventory.add(self.name, self.thing)

    def give_up(self, place: str) -> None:
        """Empty it; to be called inside `without_overrides`."""
        if not self.is_spared:
            self._swap_for_an_empty_one()

    def _swap_for_an_empty_one(self) -> int:
        """Make the object let go of its memory, its graph, its base and its attributes.

        The object gets another C++ tensor: of the same class, dtype and device, with the shape
        (0,). The old one stays whole for whoever has a share in it (views, arrays, DLPack capsules,
        autograd graphs, collectives, functions at work in other threads) and goes with the last of
        them. Swapping ``data`` or calling `Tensor.set_` would change it under their hands.

        What compiled code returns of its CUDA graphs stays as it is: it hands out the same object
        again, and torch cannot swap what it keeps so.

        Returns:
            How many references to the object there were.

        Raises:
            RuntimeError: This torch cannot do that. The tensor was left whole.
        """
        torch: Any = loaded_torch()
        swap, is_cached = _swapping(torch)
        if swap is None:
            raise RuntimeError(
                f"torch {torch.__version__} cannot empty a tensor that others may be using, so it "
                "was left whole; delete the variables that refer to it instead"
            )
        if is_cached is not None and is_cached(self.thing):
            return 0
        base = torch.Tensor
        if base.is_leaf.__get__(self.thing):
            base.grad.__set__(self.thing, None)
        other = _nothing_like(torch, self.thing)
        swap(self.thing, other)
        # A thread that is inside of it has a reference, too. One that begins to use it from
        # here on finds it empty.
        count = sys.getrefcount(self.thing)
        if self.references >= 0 and count > _references_of_a_target() + self.references:
            keep_while_in_use(other)
        base._backward_hooks.__set__(self.thing, None)
        contents_of(self.thing).clear()
        for slot in () if is_plain(torch, self.thing) else slots_of(type(self.thing)):
            try:
                slot.__delete__(self.thing)
            except (AttributeError, TypeError):
                continue  # It has none, or it is a read-only field of a class made in C.
        return count


@lru_cache(maxsize=1)
def _swapping(torch: Any) -> tuple[Any, Any]:
    return private(torch, "_C._swap_tensor_impl"), private(torch, "_C._is_cached_tensor")


@lru_cache(maxsize=1)
def _references_of_a_target() -> int:
    """Count the references to a tensor that only a target has; Python versions differ."""
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


# What another thread may be inside of

WAIT_S = 0.02
Place = tuple[int, int, int]  # a thread, a frame by its id, and the instruction in it

# A thread whose innermost function is one of these is inside no tensor, and may wait for ever.
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
    """Keep a C++ tensor for the threads that may be inside of it now.

    What is still kept when a release ends goes with a later garbage collection, of any generation,
    or a later release.
    """
    places = {place for place, is_inside in _places(current_frames) if is_inside}
    if places:
        _KEPT[id(places)] = taken_out, places
        if _after_collection not in gc.callbacks:
            gc.callbacks.append(_after_collection)


def is_any_kept() -> bool:
    """Say whether a tensor is kept for a thread that has not moved on."""
    return bool(_KEPT)


def settle(wait_s: float = WAIT_S) -> None:
    """Drop what no thread can be using any more, and wait a little for the others."""
    stop = time.perf_counter() + wait_s
    while _KEPT:
        _drop_unused(current_frames)
        if not _KEPT or time.perf_counter() >= stop:
            return
        time.sleep(0.001)


def _places(look: Callable[[], dict[int, FrameType]]) -> Iterator[tuple[Place, bool]]:
    """Yield where all threads are, and whether each may be in the middle of a tensor's method."""
    me = get_ident()
    for thread, frame in look().items():
        inner = ""  # No list of frames, which would keep the variables of this thread's alive.
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
    for key, (_, places) in list(_KEPT.items()):
        places.intersection_update(now)  # Once is enough: later calls find an empty tensor.
        if not places:
            _KEPT.pop(key, None)


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        _drop_unused(sys._current_frames)  # No collection begins in the middle of this one.
        if not _KEPT and _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)


@early_bound
def safe_tensor_cleanup(tensor_attr_name: str, obj: Any) -> bool:
    """Set ``obj.<name>`` to None and so give up the tensor, or tensors, that it held.

    Works on plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers, and whatever the attribute holds: a tensor, or a list, tuple or
    dictionary of them. For destructors and shutdown paths: never raises, imports nothing,
    initialises nothing. As safe across threads as setting an attribute is.

    The tensor itself stays whole for others that refer to it; its memory goes with the last of
    them. To take the memory although a variable lives on, use `release`.

    Args:
        tensor_attr_name: The attribute's name.
        obj: Its owner; None and half-built owners are fine.

    Returns:
        True if there was something. False where there was nothing, or where the owner refuses
        to be changed; it is then as it was.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner, a validating __setattr__: each
            # raises what it likes. A deleter may still do.
            log(DEBUG, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this, on owners that may be half built or half taken apart.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False
