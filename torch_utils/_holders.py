"""Who still holds memory that a release gave up: named as far as that can be found out.

The garbage collector can list who refers to an object, in a walk over the whole heap. So the
question is put only when something survived, only about the largest, and only where the heap is
small enough for the time that is allowed.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch_utils._runtime import DEBUG, log
from torch_utils._storages import Held

SEARCH_S = 0.01
_BLOCKS_PER_S = 50e6  # what one walk passes, measured with torch (58e6) and transformers (52e6)
_WALKS = 4  # that a search makes, at the least
_MOST = 5  # survivors that are looked into


def find_holders(torch: Any, survivors: list[Held], search_s: float) -> dict[int, tuple[str, ...]]:
    """Name who holds the largest survivors, by their position in the list. Never raises."""
    if not survivors or torch is None:
        return {}
    if _WALKS * sys.getallocatedblocks() / _BLOCKS_PER_S > search_s:
        note = "the heap is too large to search within the time allowed"
        log(DEBUG, "holders not searched for: %s", note)
        return {}
    stop = time.perf_counter() + search_s
    found: dict[int, tuple[str, ...]] = {}
    try:
        search = _Search(torch)
        for position, held in enumerate(survivors[:_MOST]):
            found[position] = tuple(dict.fromkeys(search.holders_of(held)))
            if time.perf_counter() > stop:
                break
    except Exception as error:
        # This looks into whatever objects the program has; none of them may make a release fail.
        log(DEBUG, "holders not found: %r", error)
    return found


class _Search:
    """What is asked once for all survivors."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        kinds = [torch.Tensor, torch.nn.Parameter]
        self._tensors = [t for t in gc.get_referrers(*kinds) if type(t) in kinds]
        self._frames = list(_running_frames())
        optim = sys.modules.get("torch.optim")
        self._optimizers = _instances(optim.Optimizer) if optim is not None else []

    def holders_of(self, held: Held) -> Iterator[str]:
        """Yield names of what holds one storage."""
        tensors = [t for t in self._tensors if self._is_over(t, held)]
        if not tensors:
            yield self._untracked()
            return
        for tensor in tensors:
            named = list(self._holders_of_tensor(tensor))
            yield from named
            if tensor._use_count() > 1:
                yield "an autograd graph"
            elif not named:
                yield "a numpy view" if gc.get_freeze_count() == 0 else self._untracked()

    def _is_over(self, tensor: Any, held: Held) -> bool:
        try:
            return bool(tensor.untyped_storage()._cdata == held.key)
        except (RuntimeError, NotImplementedError):  # a sparse or functional tensor
            return False

    def _untracked(self) -> str:
        if gc.get_freeze_count():
            return "an object that gc.freeze() has put aside, perhaps in a cycle"
        return "an autograd graph, or other C++ code"

    def _holders_of_tensor(self, tensor: Any) -> Iterator[str]:
        for frame in self._frames:
            for name, value in frame.f_locals.items():
                if value is tensor:
                    yield f"the variable {name!r} of {frame.f_code.co_name}()"
        for optimizer in self._optimizers:
            if _updates(optimizer, tensor):
                yield f"an optimizer ({type(optimizer).__name__})"
        own = (self._tensors, self._frames, self._optimizers)
        for referrer in gc.get_referrers(tensor):
            if isinstance(referrer, FrameType):
                if referrer not in self._frames and referrer.f_code.co_filename != __file__:
                    yield f"a frame of {referrer.f_code.co_name}() that an exception keeps"
            elif type(referrer) is dict:
                yield from self._owners_of_dictionary(referrer)
            elif not any(referrer is container for container in own):
                yield from _name_container(referrer, tensor)

    def _owners_of_dictionary(self, contents: dict[Any, Any]) -> Iterator[str]:
        module_type = self._torch.nn.Module
        for owner in gc.get_referrers(contents):
            if type(owner) is dict and any(
                owner.get(part) is contents for part in ("_parameters", "_buffers")
            ):
                for module in gc.get_referrers(owner):
                    if isinstance(module, module_type):
                        yield f"another module ({type(module).__name__})"
            elif isinstance(owner, module_type):
                yield f"another module ({type(owner).__name__})"


def _updates(optimizer: Any, tensor: Any) -> bool:
    # Loops, for a generator expression would itself be found, as a closure over the tensor.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter is tensor:
                return True
    return False


def _name_container(referrer: Any, tensor: Any) -> Iterator[str]:
    if type(referrer) in (list, tuple, set) and len(referrer) < 1000 and referrer is not tensor:
        return  # An optimizer's list of parameters, or our own; named by what holds it.
    yield "a closure" if type(referrer).__name__ == "cell" else f"a {type(referrer).__name__}"


def _running_frames() -> Iterator[FrameType]:
    """Yield the frames of all threads, without those of this package."""
    for frame in sys._current_frames().values():
        current: FrameType | None = frame
        while current is not None:
            module = current.f_globals.get("__name__") or ""
            if module.partition(".")[0] != "torch_utils":
                yield current
            current = current.f_back


def _instances(base: Any) -> list[Any]:
    """List the live instances of a class and of those that derive from it."""
    kinds, pending = [base], [base]
    while pending:
        derived = type.__subclasses__(pending.pop())
        kinds += derived
        pending += derived
    return [o for o in gc.get_referrers(*kinds) if type(o) in kinds]
