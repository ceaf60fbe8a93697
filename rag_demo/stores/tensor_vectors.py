"""Vectors as tensors: float32 in host memory or in a file, and a copy on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rag_demo.exact_search import equal_rows
from rag_demo.exact_search.search import FEW_QUERIES, Source, bfloat16_units, products_on, search
from rag_demo.search_request import Order
from rag_demo.stores.index_folder import SavedIndex
from rag_demo.vectors import GrowableRows, Mask, Pairs, Rows, Vectors, ahead

_COPIED_FROM = 1 << 11  # rows; fewer are searched in float32 as fast
_COPIED = 1 << 14  # rows at once
_COMPARED, _ONE_OF = 1 << 12, 64  # Equal rows are found again after so many new ones, or 1 of 64.
_BUFFERS = 8  # parts of a memory budget
_LEAST_ROWS = 32  # of a buffer
_NO_ROWS = GrowableRows(0, torch.empty(0, 0))


@dataclass(frozen=True)
class TensorVectors:
    """Float32 vectors in host memory or in a file, and a copy on a device; see `VectorRows`.

    The first rows lie in the file of a saved index, mapped into memory; above the memory budget,
    each search streams them. The copy grows with each change, and a load makes it whole. A CPU
    that multiplies bfloat16 fast has a copy beside float32 vectors, for batches of queries. After
    a load, the first batch makes that copy.

    Attributes:
        device, dtype, memory_budget: See `PyTorchGPURetriever`.
        saved: The saved index that holds the first rows.
        in_file: How many rows these are.
        host: The other float32 vectors, in host memory.
        copy: The copy of the first rows on the device.
        equal: How many rows were compared, and the groups of equal ones.
        stays_in_file: See `VectorRows`.
    """

    device: str
    dtype: str
    memory_budget: int | None
    saved: SavedIndex | None = None
    in_file: int = 0
    host: GrowableRows = _NO_ROWS
    copy: GrowableRows = _NO_ROWS
    equal: tuple[int, Sequence[Rows]] = (0, ())
    stays_in_file: bool = False

    @property
    def dimension(self) -> int:
        """See `VectorRows`."""
        return int(self.host.rows.shape[1])

    def __len__(self) -> int:
        return self.in_file + len(self.host)

    @property
    def buffers(self) -> list[Any]:
        """The memory of all tensors, to release it."""
        return [rows.buffer for rows in (self.host, self.copy) if rows]

    def extended(self, vectors: Vectors) -> TensorVectors:
        """See `VectorRows`."""
        host = self.host or GrowableRows(len(vectors), torch.from_numpy(vectors))
        longer = replace(self, host=host.append(torch.from_numpy(vectors)))
        if self.saved is None or self.copy:  # Else the first search makes them.
            longer._copy_for(FEW_QUERIES + 1)
            longer._equal_rows()
        return longer

    def with_saved_rows(self, saved: SavedIndex) -> TensorVectors:
        """See `VectorRows`."""
        rows, dimension, budget = saved.manifest.rows, saved.manifest.dimension, self.memory_budget
        if not rows:
            return self
        host = GrowableRows(0, torch.empty(0, dimension))
        loaded = replace(self, saved=saved, in_file=rows, host=host)
        copied = 4 if self.dtype == "float32" and self.device != "cpu" else 2  # bytes of a number
        if budget is None or rows * dimension * (4 + copied) <= budget:
            loaded._copy_for(1)
            return loaded
        if budget < (least := 4 * _BUFFERS * dimension * _LEAST_ROWS):
            raise ValueError(f"memory_budget must be at least {least} bytes for these vectors")
        return replace(loaded, stays_in_file=True)

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        host, is_first = self.host.rows.numpy(), rows < self.in_file
        if self.saved is None or not is_first.any():
            return np.asarray(host.take(rows - self.in_file, axis=0))
        first = self.saved.take(rows[is_first], mapped=not self.stays_in_file)
        if not self.host:
            return first
        result = np.empty((len(rows), self.dimension), np.float32)
        result[is_first] = first
        result[~is_first] = host.take(rows[~is_first] - self.in_file, axis=0)
        return result

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        nbytes = self.copy.rows.nbytes + 4 * len(self) * self.dimension
        return self.device, self.dtype, nbytes

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None, order: Order) -> Pairs:
        """See `VectorRows`."""
        if self.saved is not None:
            self.saved.check_length()
        groups = self._equal_rows()
        if groups:
            allowed, members = equal_rows.first_of_each(groups, allowed, len(self))
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        pairs = search(self._source(len(queries), allowed), queries, min(top_k, count))
        if groups:
            pairs = equal_rows.with_equal_rows(pairs, members, top_k, order)
        return pairs

    def _source(self, queries: int, allowed: Mask | None) -> Source:
        """Return all rows as they are searched for so many queries."""
        copy, device = self._copy_for(queries), torch.device(self.device)
        parts = self._in_memory if copy is None else [copy.rows]
        dtype = parts[0].dtype if parts else torch.float32

        def chunks(step: int) -> Iterator[Any]:
            if self.stays_in_file:
                yield from self._streamed(step)
            for part in parts:
                yield from part.to(device).split(step)

        is_true = device.type == "cuda" and copy is not None and dtype == torch.float32
        return Source(
            device,
            products_on(device, dtype),
            chunks,
            self.take,
            allowed,
            0.0 if copy is None else copy.error,
            parts[0] if is_true else None,  # Other devices may lack float64.
            self.memory_budget and self.memory_budget // 4,
        )

    def _streamed(self, step: int) -> Iterator[Any]:
        """Yield the vectors in the file through two buffers; the next ones are read meanwhile."""
        assert self.saved is not None and self.memory_budget is not None
        self.saved.check_vectors()
        count, dimension, read_into = self.in_file, self.dimension, self.saved.read_into
        step = min(step, self.memory_budget // _BUFFERS // (4 * dimension), count)
        is_pinned = self.device.startswith("cuda")
        buffers = [torch.empty(step, dimension, pin_memory=is_pinned) for _ in range(2)]

        def read(start: int) -> Any:
            buffer = buffers[start // step % 2][: count - start]
            read_into(start, buffer.numpy())
            return buffer

        for buffer in ahead(read, range(0, count, step)):
            yield buffer.to(self.device)  # It waits, so the buffer is free again.

    @property
    def _in_memory(self) -> list[Any]:
        """The float32 vectors in host memory, as tensors: all that are not streamed."""
        parts = [self.host.rows] if self.host else []
        if self.saved is not None and not self.stays_in_file:
            parts.insert(0, torch.from_numpy(self.saved.vectors))
        return parts

    def _copy_for(self, queries: int) -> GrowableRows | None:
        """Return the copy for so many queries, and make what is missing; None without a copy."""
        dtype = getattr(torch, self.dtype)
        if self.device == "cpu" and dtype == torch.float32:
            is_batch = queries > FEW_QUERIES and len(self) >= _COPIED_FROM
            dtype = torch.bfloat16 if is_batch and bfloat16_units() else None
        if dtype is None or self.stays_in_file:
            return None
        like = torch.empty(0, self.dimension, dtype=dtype, device=self.device)
        copy = self.copy or GrowableRows(len(self), like)
        for start in range(len(copy), len(self), _COPIED):
            some = self.take(np.arange(start, min(start + _COPIED, len(self))))
            vectors = torch.from_numpy(some).to(self.device)
            rounded = vectors.to(dtype)
            distance = float((vectors - rounded.float()).norm(dim=1).max())
            copy = copy.append(rounded, distance * (1 + 1e-4))  # more than float32 can err
        object.__setattr__(self, "copy", copy)  # Any search may store it.
        return copy

    def _equal_rows(self) -> Sequence[Rows]:
        """Return the groups of equal rows, among nearly all rows."""
        compared, groups = self.equal
        new = len(self) - compared
        if not self.stays_in_file and new > max(_COMPARED, len(self) // _ONE_OF):
            groups = equal_rows.find_equal_rows(self._in_memory, self.take)
            object.__setattr__(self, "equal", (len(self), groups))  # Any search may store them.
        return groups
