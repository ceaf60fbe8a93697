"""Weak references to storages, as plain numbers, and without a Python object for any storage.

Such an object would cost a microsecond and a place in the garbage collector's lists, and worse:
a storage that has one is freed while the GIL is held, so that other threads wait for the kernel to
take back a gigabyte. One that never had is freed without it. So one scratch object is
pointed at each storage in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat, starmap
from typing import Any, NamedTuple

from torch_utils._releasing.classes import is_among


class Noted(NamedTuple):
    """A storage as it was noted.

    Attributes:
        weak: The weak reference; to be freed once, by `StorageReader.free`.
        nbytes: Its size.
        is_lent: Whether its memory belongs to somebody else: an array, a buffer, a mapped file.
        begin: Where that memory is; 0 if that was not asked.
    """

    weak: int
    nbytes: int
    is_lent: bool
    begin: int


def plain_tensors(torch: Any) -> tuple[type, ...]:
    """List the classes of tensors that are torch's own; none where torch is not loaded."""
    if torch is None:
        return ()
    buffer = getattr(torch.nn, "Buffer", torch.nn.Parameter)  # from torch 2.5 on
    return torch.Tensor, torch.nn.Parameter, buffer


class StorageReader:
    """Notes storages; for one thread, and with torch functions disabled.

    The private calls that it rests on are tried out once, on a tensor of its own. On a torch that
    lacks them each storage gets its Python object, which costs time but is no less right.
    """

    def __init__(self, torch: Any) -> None:
        kind = torch.UntypedStorage
        self.is_expired: Any = kind._expired
        self.free: Any = kind._free_weak_ref
        self.address: Callable[[Any], int] = getattr(torch._C, "_storage_address", _missing)
        self.plain_kinds = plain_tensors(torch)
        self._untyped = torch.Tensor.untyped_storage
        self._torch = torch
        self._rest = 0
        self._is_prepared = False

    def _prepare(self) -> None:
        """Make what storages are noted with; most scopes and releases of nothing need none."""
        torch = self._torch
        if _PROVEN.get("fast", True):
            kind = torch.UntypedStorage
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                # In this order: a tuple lets go of its last entry first, and the scratch object
                # has to be alone with what it points at when it goes.
                self._pair = kind(0, device="cpu"), _bytes_of_torch(torch, 0)
                if "fast" not in _PROVEN:
                    _PROVEN["fast"] = self._is_fast(torch)
                if _PROVEN["fast"]:
                    self._rest = self.address(self._pair[1])

    def _is_fast(self, torch: Any) -> bool:
        """Try the private calls on a tensor: counted once, seen to live, seen to go."""
        try:
            self._rest = self.address(self._pair[1])
            tensor = _bytes_of_torch(torch, 3)
            key = self.address(tensor)
            noted = self.note(tensor)
            alone = torch._C._storage_Use_Count(key) == 1
            lives = not self.is_expired(noted.weak)
            del tensor
            gone = self.is_expired(noted.weak)
            self.free(noted.weak)
        except (AttributeError, TypeError, RuntimeError):
            return False
        finally:
            self._rest = 0
        return bool(noted.nbytes == 3 and not noted.is_lent and alone and lives and gone)

    def is_plain(self, tensor: Any) -> bool:
        """Whether a tensor's storage can be noted by its address."""
        return self.is_fast and is_among(type(tensor), self.plain_kinds) and tensor.is_cpu

    @property
    def is_fast(self) -> bool:
        """Whether storages can be noted by their addresses."""
        if not self._is_prepared:
            self._prepare()
            self._is_prepared = True
        return self._rest != 0

    def note(self, tensor: Any) -> Noted:
        """Note the storage of a plain tensor."""
        (weak,), (nbytes,), (is_own,) = self.note_all((tensor,))
        if is_own:
            return Noted(weak, nbytes, False, 0)
        self.free(weak)
        return self.note_object(self.storage_of(tensor))

    def note_all(self, tensors: Sequence[Any]) -> tuple[list[int], list[int], list[bool]]:
        """Note storages in one step of C: weak references, sizes, and whether they are torch's.

        From asking a tensor for its storage to having the weak reference no other thread has its
        turn: one that empties the tensor would free the storage in between.
        """
        scratch = self._pair[0]
        none = repeat(())
        try:
            # In turn, for each: a zip takes one from each of them, in this order.
            noted = list(
                chain.from_iterable(
                    zip(
                        map(scratch._set_cdata, map(self.address, tensors)),
                        starmap(scratch._weak_ref, none),
                        starmap(scratch.nbytes, none),
                        starmap(scratch.resizable, none),
                        strict=False,
                    )
                )
            )
        finally:
            scratch._set_cdata(self._rest)
        return noted[1::4], noted[2::4], noted[3::4]

    def storage_of(self, tensor: Any) -> Any:
        """Return the storage of any other tensor that is made of one; it may have no memory."""
        return self._untyped(tensor)

    def note_object(self, storage: Any) -> Noted:
        """Note a storage that has a Python object."""
        on_host = storage.device.type == "cpu"
        is_lent = not storage.resizable()
        begin = storage.data_ptr() if is_lent and on_host else 0
        return Noted(storage._weak_ref(), storage.nbytes(), is_lent, begin)


def _missing(tensor: Any) -> int:
    raise AttributeError("this torch has no _storage_address")


def _bytes_of_torch(torch: Any, count: int) -> Any:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


_PROVEN: dict[str, bool] = {}
