"""What is computed from an index's vectors and texts, and kept beside them: arrays by name.

They lie in one file, each from a multiple of 64 bytes on. Nothing depends on them: an index
without them is as right, and what needs them computes them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import IndexFileError, damaged
from rag_demo.storage.mapped_file import MappedFile
from rag_demo.storage.writing import BlockWriter

__all__ = ["DerivedArrays", "check_derived", "write_derived"]

Array = npt.NDArray[Any]
_ALIGNED_BYTES = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DTYPES = {np.dtype(kind).str for kind in "?bBhHiIqQefd"}


class DerivedArrays(Mapping[str, Array]):
    """The arrays of an index that was read. Threads may share it.

    An array is mapped, and its bytes are compared with their checksums, when it is asked for;
    twice it is not. Changing one changes neither the file nor what others read.

    Args:
        file: Where they are; None if there are none.
        described: For each its dtype, shape, and first byte.

    Raises:
        IndexFileError: What describes them is wrong, or (when an array is asked for) a block
            is not what was written.
    """

    def __init__(self, file: MappedFile | None, described: Any) -> None:
        self._file = file
        self._places: dict[str, tuple[str, tuple[int, ...], int]] = {}
        if file is not None:
            try:
                self._places = {name: _place(name, each) for name, each in described.items()}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise damaged(file.path, f"its arrays are not described: {error!r}") from None
            for dtype, shape, start in self._places.values():
                # Python's own numbers: a stranger's shape cannot overflow.
                if start + _nbytes(dtype, shape) > len(file):
                    raise damaged(file.path, "an array is not where it should be")

    def __getitem__(self, name: str) -> Array:
        dtype, shape, start = self._places[name]
        assert self._file is not None
        self._file.check_length()
        self._file.read(start, start + _nbytes(dtype, shape))
        return self._file.array(dtype, shape, start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Without looking at its bytes, as Mapping would.

    def check_all(self) -> None:
        """Compare all of them with their checksums."""
        if self._file is not None:
            self._file.check_all()

    def check_length(self) -> None:
        """Raise an IndexFileError if their file was cut off since it was opened."""
        if self._file is not None:
            self._file.check_length()


def check_derived(arrays: Mapping[str, Array]) -> None:
    """Refuse what cannot be saved.

    Raises:
        IndexFileError: A name or a type is none that can be; the message names it.
    """
    for name, array in arrays.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise IndexFileError(f"{name!r} is no name for a derived array")
        if not isinstance(array, np.ndarray) or array.dtype.str not in _DTYPES:
            what = getattr(array, "dtype", type(array).__name__)
            raise IndexFileError(f"the derived array {name!r} is of {what}, not of numbers")


def write_derived(file: BlockWriter, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Write arrays one behind the other; return what describes them."""
    described = {}
    for name, array in arrays.items():
        file.write(bytes(-file.nbytes % _ALIGNED_BYTES))
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "start": file.nbytes,
        }
        file.write(np.ascontiguousarray(array))
    return described


def _place(name: str, described: dict[str, Any]) -> tuple[str, tuple[int, ...], int]:
    dtype, shape, start = described["dtype"], described["shape"], described["start"]
    numbers = [start, *shape]
    if not (
        _NAME.fullmatch(name)
        and dtype in _DTYPES
        and len(shape) <= 8
        and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        and start % _ALIGNED_BYTES == 0
    ):
        raise ValueError(name)
    return dtype, tuple(shape), start


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    total = np.dtype(dtype).itemsize
    for number in shape:
        total *= number
    return total
