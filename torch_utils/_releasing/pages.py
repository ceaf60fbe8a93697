"""Give the pages of a large tensor back without holding the GIL.

Freeing one gigabyte keeps the kernel busy for some 70 ms, and a tensor's destructor holds the
GIL meanwhile: every other thread stands still. So the pages of a large storage are dropped
first, by a call that lets go of the GIL; what the destructor then unmaps is empty.
"""

from __future__ import annotations

import sys
from typing import Any

from torch_utils._runtime import DEBUG, log

LARGE_BYTES = 8 << 20
_MADV_DONTNEED = 4  # of Linux; see madvise(2)
_PAGE_BYTES = 4096


def drop_pages(torch: Any, tensor: Any) -> bool:
    """Drop the pages of a tensor whose one reference is the caller's variable.

    Only where that can be proven: no other Python reference, no other owner of the tensor (an
    autograd graph) or of its storage (a view), and memory of torch's own allocator. The proof
    asks private counters of torch; without them, nothing is done. Never raises.

    Returns:
        True if they were dropped. The tensor's values are then undefined.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or not sys.platform.startswith("linux"):
        return False
    try:
        if _is_unsuitable(torch, tensor) or _owners(torch, tensor) != _owners_if_alone(torch):
            return False
        storage = tensor.untyped_storage()
        begin = -(-storage.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        end = (storage.data_ptr() + storage.nbytes()) // _PAGE_BYTES * _PAGE_BYTES
        libc = ctypes.CDLL(None)
        arguments = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        return bool(libc.madvise(*arguments, _MADV_DONTNEED) == 0)
    except (RuntimeError, NotImplementedError, OSError, AttributeError, TypeError) as error:
        # AttributeError: this torch has none of the counters.
        log(DEBUG, "pages of a large tensor not dropped beforehand: %r", error)
        return False


def _is_unsuitable(torch: Any, tensor: Any) -> bool:
    """Whether the memory is not torch's own, on the CPU, and large."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return True
    if tensor.layout != torch.strided or tensor.is_quantized:
        return True
    storage = tensor.untyped_storage()
    return storage.nbytes() < LARGE_BYTES or not storage.resizable() or storage.is_shared()


def _owners(torch: Any, tensor: Any) -> tuple[int, int, int, int]:
    """Count the owners of a tensor and of its storage, in Python and in C++."""
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        tensor._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
    )


def _owners_if_alone(torch: Any) -> tuple[int, int, int, int]:
    """Count those of a tensor that one variable of `drop_pages`'s caller holds.

    Counted rather than written down: how many a call itself adds differs between Pythons and
    between versions of torch.
    """

    def called_like_drop_pages(torch: Any, tensor: Any) -> tuple[int, int, int, int]:
        return _owners(torch, tensor)

    tensor = torch.empty(1)
    return called_like_drop_pages(torch, tensor)
